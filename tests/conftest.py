"""Strict mode for every test, and which of the tests run."""

from typing import Any

import pytest

from tests.support import (
    devices,
    groups,
    selection,
    strict,  # noqa: F401 (it sets JAX up)
)

LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_report_header() -> list[str]:
    seed = selection.FIRST_PROGRAM
    programs = f"random programs from seed {seed} on (set PERGRAD_SEED={seed} to repeat them)"
    return [programs, selection.header()]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any) -> Any:
    made = yield
    if made and selection.file_of(collector) in devices.FILES:
        return [devices.elsewhere(item) for item in made]
    return made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    # After the hooks that leave out what -k and -m do not name.
    if any("::" in argument for argument in config.args):
        return
    chosen = dict.fromkeys(selection.chosen(items))
    left_out = [item for item in items if item not in chosen]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = selection.lists_of(left_out)
    items[:] = chosen


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> groups.Scheduling:
    return groups.Scheduling(config, log)


# With several processes it is they who collect; all of them collect the same, and the first to end tells
# the process that prints.


def pytest_sessionfinish(session: Any) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(LEFT_OUT, getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    if left_out := config.stash.get(LEFT_OUT, {}):
        terminalreporter.section("left out")
        for line in selection.summary(left_out):
            terminalreporter.line(line)
