"""Stage 3: a strategy for every tail and statistic, and how many examples run at a time.

In reading order: `choose` (a strategy for every tail and statistic), `backbone` (the operations and the
memory of the backbone), `microbatch` (how many examples run at a time), `cotangent` (what the backward
pass starts from), `schedule` (all these decisions together), `plan` (what the schedule costs), `table`
(how a plan is printed).
"""

from pergrad._plan import table as table
from pergrad._plan.backbone import equations_of as equations_of
from pergrad._plan.choose import Asked as Asked
from pergrad._plan.choose import Choice as Choice
from pergrad._plan.choose import Forced as Forced
from pergrad._plan.choose import TailPlan as TailPlan
from pergrad._plan.microbatch import activations as activations
from pergrad._plan.plan import Plan as Plan
from pergrad._plan.plan import bytes_of_two as bytes_of_two
from pergrad._plan.plan import describe as describe
from pergrad._plan.schedule import Schedule as Schedule
from pergrad._plan.schedule import make_schedule as make_schedule
from pergrad._plan.table import Row as Row
from pergrad._plan.table import keys_of as keys_of
from pergrad._plan.table import ratio as ratio
from pergrad._plan.table import short as short
