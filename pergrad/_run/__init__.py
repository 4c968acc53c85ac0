"""Stage 4: the plan runs.

In reading order: `states` (what is known of each parameter and statistic), `reduce` (one tail over some
examples), `backbone` (the model, with the tails in its loops), `clip` (the tails once more, with other
weights), `microbatches` (all examples), `last` (what needs all of them side by side).
"""

from pergrad._run.last import part_of_all as part_of_all
from pergrad._run.last import run_last as run_last
from pergrad._run.microbatches import run as run
from pergrad._run.states import States as States
