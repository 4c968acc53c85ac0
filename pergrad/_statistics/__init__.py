"""What can be asked for: statistics of the gradients of the examples of a batch.

In reading order: `base` (what every statistic says about itself), `of_parameters` (statistics of each
parameter on its own), `of_examples` (statistics of an example's whole gradient, and of its loss),
`by_norm` (means whose weights depend on norms), `sketch` (random projections), `combine` (merges the
results of several batches).
"""

from pergrad._statistics.base import Accumulator as Accumulator
from pergrad._statistics.base import Compressing as Compressing
from pergrad._statistics.base import Layout as Layout
from pergrad._statistics.base import LeafStatistic as LeafStatistic
from pergrad._statistics.base import Merging as Merging
from pergrad._statistics.base import OfAllGradients as OfAllGradients
from pergrad._statistics.base import Per as Per
from pergrad._statistics.base import Phase as Phase
from pergrad._statistics.base import Quantity as Quantity
from pergrad._statistics.base import Reading as Reading
from pergrad._statistics.base import Source as Source
from pergrad._statistics.base import State as State
from pergrad._statistics.base import Statistic as Statistic
from pergrad._statistics.base import Unit as Unit
from pergrad._statistics.base import WeightedSum as WeightedSum
from pergrad._statistics.base import holders as holders
from pergrad._statistics.by_norm import ClippedMean as ClippedMean
from pergrad._statistics.by_norm import WeightedMean as WeightedMean
from pergrad._statistics.combine import all_combine as all_combine
from pergrad._statistics.combine import combine as combine
from pergrad._statistics.of_examples import By as By
from pergrad._statistics.of_examples import Count as Count
from pergrad._statistics.of_examples import Dot as Dot
from pergrad._statistics.of_examples import Factors as Factors
from pergrad._statistics.of_examples import Gram as Gram
from pergrad._statistics.of_examples import Loss as Loss
from pergrad._statistics.of_examples import Norm as Norm
from pergrad._statistics.of_examples import SquaredNorm as SquaredNorm
from pergrad._statistics.of_examples import Where as Where
from pergrad._statistics.of_examples import added_up as added_up
from pergrad._statistics.of_parameters import PLAIN_MEAN as PLAIN_MEAN
from pergrad._statistics.of_parameters import Fold as Fold
from pergrad._statistics.of_parameters import Individual as Individual
from pergrad._statistics.of_parameters import Mean as Mean
from pergrad._statistics.of_parameters import Variance as Variance
from pergrad._statistics.of_parameters import mean_of as mean_of
from pergrad._statistics.of_parameters import power as power
from pergrad._statistics.sketch import Project as Project
from pergrad._statistics.sketch import Signs as Signs
from pergrad._statistics.sketch import SketchLayout as SketchLayout
