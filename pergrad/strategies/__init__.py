"""Strategies: ways to reduce a tail to statistics, one file each.

All of them give the same numbers; which one is used for what is decided in `_plan`.
"""

from pergrad.strategies._strategy import Examples as Examples
from pergrad.strategies._strategy import Job as Job
from pergrad.strategies._strategy import Strategy as Strategy
from pergrad.strategies.centred import Centred as Centred
from pergrad.strategies.factored import Factored as Factored
from pergrad.strategies.gram import Gram as Gram
from pergrad.strategies.materialise import Materialise as Materialise
from pergrad.strategies.sparse import Sparse as Sparse
from pergrad.strategies.streamed import Streamed as Streamed
from pergrad.strategies.summed import Summed as Summed
