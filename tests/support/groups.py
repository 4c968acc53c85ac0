"""Which tests share a process, where several run them."""

from xdist.scheduler import LoadScopeScheduling

from tests.support.every_case import CASE

# Files whose tests are runs of a few programs, which one process compiles once, or one run of another
# process.
ONE_WORKER = {
    "library/test_devices.py",
    "library/test_devices_apart.py",
    "library/test_sharded_parameters.py",
    "library/test_sharded_programs.py",
    "library/test_varying.py",
    "lab/compare/test_sweep.py",
    "lab/pages/test_gather.py",
    "lab/run/test_train.py",
    "lab/studies/test_studies.py",
}


def group_of(test: str) -> str:
    """The group of the test with this name and path: the tests of a group run in one process.

    The tests of a case are a group, so that its truth and its trace are made once. A test that is in no
    other group is one by itself.
    """
    path, _, name = test.partition("::")
    file = path.removeprefix("tests/")
    case = name.partition("[")[2].removesuffix("]")
    return file if file in ONE_WORKER else case if case in CASE else test


class Scheduling(LoadScopeScheduling):
    """Hands out groups of tests, those with many tests first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
