"""Programs and numbers. This folder knows nothing of gradients, and every later folder builds on it.

In reading order: `backend` (what a kind of device can do), `numerics` (weigh, widen, add), `equations`
(reading and running them), `primitives` (what each is), `dependence` (what depends on what), `loop` and
`conditional` (a `scan` and a `cond` in words), `custom` (calls with a derivative of their own), `counts`
(operations and bytes of equations), `devices` (sums over the devices that share a batch), `shards`
(arrays that are divided among them), `varying` (programs in a `shard_map` that checks along which mesh
axes arrays vary).
"""

from pergrad._ir import backend as backend
from pergrad._ir import counts as counts
from pergrad._ir.backend import Backend as Backend
from pergrad._ir.backend import plan_for as plan_for
from pergrad._ir.conditional import take_branch as take_branch
from pergrad._ir.conditional import take_by_example as take_by_example
from pergrad._ir.counts import nbytes as nbytes
from pergrad._ir.counts import size as size
from pergrad._ir.custom import CUSTOM_CALLS as CUSTOM_CALLS
from pergrad._ir.custom import without_derivative as without_derivative
from pergrad._ir.dependence import dependent_inputs as dependent_inputs
from pergrad._ir.dependence import dependents as dependents
from pergrad._ir.dependence import evaluate_independent as evaluate_independent
from pergrad._ir.dependence import is_in as is_in
from pergrad._ir.dependence import needed_equations as needed_equations
from pergrad._ir.dependence import needed_places as needed_places
from pergrad._ir.dependence import readers_of as readers_of
from pergrad._ir.dependence import takes_branches_by as takes_branches_by
from pergrad._ir.dependence import variables as variables
from pergrad._ir.devices import Devices as Devices
from pergrad._ir.equations import Env as Env
from pergrad._ir.equations import distinct as distinct
from pergrad._ir.equations import evaluate as evaluate
from pergrad._ir.equations import evaluate_wide as evaluate_wide
from pergrad._ir.equations import programs as programs
from pergrad._ir.equations import read as read
from pergrad._ir.equations import rounds as rounds
from pergrad._ir.equations import starting_env as starting_env
from pergrad._ir.loop import Loop as Loop
from pergrad._ir.numerics import Weights as Weights
from pergrad._ir.numerics import accumulation_dtype as accumulation_dtype
from pergrad._ir.numerics import added as added
from pergrad._ir.numerics import full_precision as full_precision
from pergrad._ir.numerics import in_groups as in_groups
from pergrad._ir.numerics import product as product
from pergrad._ir.numerics import total as total
from pergrad._ir.numerics import weigh as weigh
from pergrad._ir.numerics import weigh_factors as weigh_factors
from pergrad._ir.numerics import weighted_sum as weighted_sum
from pergrad._ir.numerics import widen as widen
from pergrad._ir.numerics import with_example_axis as with_example_axis
from pergrad._ir.primitives import ADDITIONS as ADDITIONS
from pergrad._ir.primitives import LOOPS as LOOPS
from pergrad._ir.primitives import ONE_TO_ONE as ONE_TO_ONE
from pergrad._ir.primitives import Is as Is
from pergrad._ir.primitives import those_that_are as those_that_are
from pergrad._ir.shards import Division as Division
from pergrad._ir.shards import Shard as Shard
from pergrad._ir.shards import names_in as names_in
from pergrad._ir.shards import number_of_pieces as number_of_pieces
from pergrad._ir.shards import without_axes as without_axes
from pergrad._ir.varying import evaluate_varying as evaluate_varying
