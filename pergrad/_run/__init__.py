"""Stage 4: the schedule runs.

In reading order: `states` (the states and values of all statistics), `shards` (states that are divided
among devices), `reduce` (reduces one tail over some examples), `backbone` (runs the model, with the
tails in its loops), `finite` (which examples are finite), `by_norm` (means whose weights depend on
norms), `microbatches` (runs all examples), `last` (statistics that need all examples side by side).
"""

from pergrad._run.last import Block as Block
from pergrad._run.last import inner_products as inner_products
from pergrad._run.last import part_of_all as part_of_all
from pergrad._run.last import run_last as run_last
from pergrad._run.last import with_shares_of_kept as with_shares_of_kept
from pergrad._run.microbatches import Given as Given
from pergrad._run.microbatches import run as run
from pergrad._run.microbatches import runs_alone as runs_alone
from pergrad._run.shards import Shards as Shards
from pergrad._run.states import States as States
