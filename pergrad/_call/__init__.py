"""Around the four steps: what users call, their arguments, and their results."""

from pergrad._call import spmd as spmd
from pergrad._call.api import explain as explain
from pergrad._call.api import grad_stats as grad_stats
from pergrad._call.api import value_and_stats as value_and_stats
from pergrad._call.arguments import check_others as check_others
from pergrad._call.arguments import places as places
from pergrad._call.arguments import roles_of as roles_of
from pergrad._call.call import Call as Call
from pergrad._call.check import COMPARED as COMPARED
from pergrad._call.check import check as check
from pergrad._call.check import checker as checker
from pergrad._call.request import ArgNums as ArgNums
from pergrad._call.request import MicrobatchSize as MicrobatchSize
from pergrad._call.request import Request as Request
from pergrad._call.request import StrategyName as StrategyName
from pergrad._call.wrap import keywords_of as keywords_of
from pergrad._call.wrap import returning_nothing as returning_nothing
from pergrad._call.wrap import returning_plan as returning_plan
from pergrad._call.wrap import returning_stats as returning_stats
