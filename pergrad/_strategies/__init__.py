"""Strategies: ways to reduce a tail to statistics, one file each.

All strategies give the same numbers. Each of them says itself when it applies, what it costs, and why it
is chosen; `_plan` compares the members of `STRATEGIES`. In reading order: `work` (what prices are made
of), `base` (what every strategy has), then the strategies, beginning with the simplest: `materialise`,
`streamed`, `summed`, `factored`, `centred`, `gram`, `projected`, `sparse`.
"""

from pergrad._strategies.base import Job as Job
from pergrad._strategies.base import Strategy as Strategy
from pergrad._strategies.centred import Centred
from pergrad._strategies.factored import Factored
from pergrad._strategies.gram import InnerProducts
from pergrad._strategies.materialise import Materialise as Materialise
from pergrad._strategies.projected import Projected
from pergrad._strategies.sparse import Sparse
from pergrad._strategies.streamed import Streamed
from pergrad._strategies.summed import Summed as Summed
from pergrad._strategies.work import Work as Work

# Among strategies with equal prices the first one is chosen.
STRATEGIES: tuple[Strategy, ...] = (
    Summed(),
    Factored(),
    Centred(),
    InnerProducts(),
    Projected(),
    Sparse(),
    Streamed(),
    Materialise(),
)
