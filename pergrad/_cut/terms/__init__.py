"""Terms: the sums over positions at which a gradient program is cut. Each kind of term has its own file.

`TERMS` is the registry. For a primitive it has the function `match`, which makes a term of an equation,
or returns None if the equation is no such term. Without any entry every gradient would be a `Total`,
which is formed for each example: an entry can only make things cheaper.
"""

from collections.abc import Callable, Collection, Mapping

from jax.extend.core import primitives

from pergrad import _compat
from pergrad._compat import JaxprEqn, Primitive, Var
from pergrad._cut.terms._term import Term as Term
from pergrad._cut.terms.convolution import Convolution as Convolution
from pergrad._cut.terms.product import Product as Product
from pergrad._cut.terms.product import axes_of_product as axes_of_product
from pergrad._cut.terms.ragged import Ragged as Ragged
from pergrad._cut.terms.scatter import Lookup as Lookup
from pergrad._cut.terms.scatter import Scatter as Scatter
from pergrad._cut.terms.scatter import Slice as Slice
from pergrad._cut.terms.total import Sum as Sum
from pergrad._cut.terms.total import Total as Total

# Makes a term of an equation, from the places of the operands that vary from example to example and from
# the equation that makes each variable.
Match = Callable[[JaxprEqn, Collection[int], Mapping[Var, JaxprEqn]], Term | None]

TERMS: dict[Primitive, Match] = {
    primitives.conv_general_dilated_p: Convolution.match,
    primitives.dot_general_p: Product.match,
    primitives.dynamic_update_slice_p: Slice.match,
    primitives.scatter_add_p: Scatter.match,
    _compat.ragged_dot_general_p: Ragged.match,
}

# If single contributions are asked for, plain sums are terms, too.
SPLIT_TERMS: dict[Primitive, Match] = {primitives.reduce_sum_p: Sum.match}
