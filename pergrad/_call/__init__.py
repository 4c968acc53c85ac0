"""Around the four stages: the functions that users call, their arguments, and their results.

In reading order: `api` (the public functions), `request` (checks their options), `wrap` (gives the
functions that users get back a name and a signature), `arguments` (the role of each argument),
`max_norms` (the largest norm at each parameter), `positions` (whether parameters have positions in
common), `scope` (what a loss must not take from the scope around it), `call` (runs the four stages for
one call), `results` (makes the results), `named_axes` (what a loss may say of mesh axes), `arrays` (a
call as a function of its arrays), `varying` (one call in a `shard_map` that checks varying axes), `mesh`
and `spmd` (one call on several devices), `pairs` (inner products of the gradients of two sets of
examples), `check` (tests whether a loss is a mean over examples).
"""

from pergrad._call.api import explain as explain
from pergrad._call.api import grad_stats as grad_stats
from pergrad._call.api import value_and_stats as value_and_stats
from pergrad._call.arguments import places as places
from pergrad._call.call import Call as Call
from pergrad._call.check import check as check
from pergrad._call.pairs import gram as gram
from pergrad._call.request import ArgNums as ArgNums
from pergrad._call.request import MicrobatchSize as MicrobatchSize
from pergrad._call.request import Nonfinite as Nonfinite
from pergrad._call.request import Request as Request
from pergrad._call.request import StrategyName as StrategyName
from pergrad._call.wrap import keywords_of as keywords_of
