"""Stage 2: the gradient program becomes a backbone and tails.

In reading order: `terms/` (the sums that tails begin with), `steps` (the linear equations after them),
`tail` (what a tail is), `find` (where tails begin), `hoist/` (sums leave loops and branches), `cut` (the
program is divided into backbone and tails), `examples` (what a tail is reduced over), `units` (groups
and single contributions in the place of examples), `blocks` (a gradient in blocks), `ways` (where steps
bring the entries of a term), `factor_pairs` (inputs and residuals laid out like the parameter).
"""

from pergrad._cut.blocks import Divided as Divided
from pergrad._cut.blocks import divided as divided
from pergrad._cut.cut import Cut as Cut
from pergrad._cut.cut import CutLoop as CutLoop
from pergrad._cut.cut import Part as Part
from pergrad._cut.cut import make_cut as make_cut
from pergrad._cut.examples import Examples as Examples
from pergrad._cut.factor_pairs import FactorLayout as FactorLayout
from pergrad._cut.factor_pairs import FactorPair as FactorPair
from pergrad._cut.factor_pairs import depends_on_cotangent as depends_on_cotangent
from pergrad._cut.factor_pairs import factor_layout as factor_layout
from pergrad._cut.factor_pairs import factor_pair as factor_pair
from pergrad._cut.find import Wanted as Wanted
from pergrad._cut.find import leave_loops as leave_loops
from pergrad._cut.hoist.hoist import hoist as hoist
from pergrad._cut.steps import STEPS as STEPS
from pergrad._cut.steps import adds as adds
from pergrad._cut.steps import is_zero as is_zero
from pergrad._cut.tail import Tail as Tail
from pergrad._cut.terms import TERMS as TERMS
from pergrad._cut.terms import Term as Term
from pergrad._cut.terms.product import Product as Product
from pergrad._cut.terms.scatter import Lookup as Lookup
from pergrad._cut.terms.scatter import Rows as Rows
from pergrad._cut.units import Units as Units
from pergrad._cut.units import formed_gradients as formed_gradients
from pergrad._cut.units import positions_of as positions_of
from pergrad._cut.units import units_of as units_of
from pergrad._cut.units import units_per_example as units_per_example
from pergrad._cut.ways import Way as Way
from pergrad._cut.ways import of_nothing as of_nothing
from pergrad._cut.ways import ways_to as ways_to
