"""Strategies: ways to reduce a tail to statistics, one file each.

All of them give the same numbers. A strategy says itself when it applies, what it costs, and why it is
taken; `_plan` compares them.
"""

from pergrad._strategies.base import Job as Job
from pergrad._strategies.base import Strategy as Strategy
from pergrad._strategies.centred import Centred as Centred
from pergrad._strategies.factored import Factored as Factored
from pergrad._strategies.gram import Gram as Gram
from pergrad._strategies.materialise import Materialise as Materialise
from pergrad._strategies.sparse import Sparse as Sparse
from pergrad._strategies.streamed import Streamed as Streamed
from pergrad._strategies.summed import Summed as Summed
