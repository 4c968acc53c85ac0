"""Strategies: ways to reduce a tail to statistics, one file each.

All of them give the same numbers. A strategy says itself when it applies, what it costs, and why it is
taken; `_plan` compares those of `STRATEGIES`. In reading order: `work` (what prices are made of),
`base`, then the strategies from the simplest on.
"""

from pergrad._strategies.base import Job as Job
from pergrad._strategies.base import Strategy as Strategy
from pergrad._strategies.centred import Centred
from pergrad._strategies.factored import Factored
from pergrad._strategies.gram import InnerProducts
from pergrad._strategies.materialise import Materialise as Materialise
from pergrad._strategies.sparse import Sparse
from pergrad._strategies.streamed import Streamed
from pergrad._strategies.summed import Summed as Summed
from pergrad._strategies.work import Work as Work

# The order is that of preference among equal prices.
STRATEGIES: tuple[Strategy, ...] = (
    Summed(),
    Factored(),
    Centred(),
    InnerProducts(),
    Sparse(),
    Streamed(),
    Materialise(),
)
