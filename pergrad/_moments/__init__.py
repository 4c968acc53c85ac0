"""The moments of gradients that optimizers and diagnostics work with.

In reading order: `names` (the names under which they ask for statistics), `estimates` (the squared mean
and the variance of an example's gradient, from the moments of a batch).
"""

from pergrad._moments.estimates import correction as correction
from pergrad._moments.estimates import mu2_of as mu2_of
from pergrad._moments.estimates import sigma2_of as sigma2_of
from pergrad._moments.names import VOCABULARY as VOCABULARY
from pergrad._moments.names import Stats as Stats
from pergrad._moments.names import asked as asked
from pergrad._moments.names import missing as missing
from pergrad._moments.names import written as written
