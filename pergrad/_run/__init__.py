"""Step 4: the plan runs."""

from pergrad._run.run import Outcome as Outcome
from pergrad._run.run import Results as Results
from pergrad._run.run import part_of_all as part_of_all
from pergrad._run.run import run as run
from pergrad._run.run import run_last as run_last
