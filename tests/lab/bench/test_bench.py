"""The benchmark: every model gives the right numbers, and all that was measured is told."""

import dataclasses
import io
import json
import math
import subprocess
from typing import Any, get_args

import jax
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from pergrad.lab import cli, timing
from pergrad.lab.bench import cases, drawings, grid, peak, price, run, tables, tasks
from pergrad.lab.bench import docs as written
from pergrad.lab.bench.models import MLP
from pergrad.lab.bench.tasks import (
    ACCUMULATED,
    AUTO,
    FLOOR,
    FLOORS,
    JAX_PRIVACY,
    MICRO_GRAD,
    PERGRAD,
    VMAP,
)
from pergrad.lab.config import CaseName, TaskName
from pergrad.lab.errors import LabError
from pergrad.lab.run import records
from tests.support import pages, sheets

EXAMPLE = "tests.support.own_loss:example"
# optax's asks a mesh for what those of older JAX do not know, and is then left out.
HAS_MICRO_GRAD = hasattr(jax.sharding.AbstractMesh, "are_all_axes_explicit")


@pytest.fixture(autouse=True)
def as_for_users():
    with pages.jax_as_for_users():
        yield


# The models.

TINY = {
    "batch": 3,
    "length": 5,
    "size": 8,
    "vocab": 11,
    "layers": 1,
    "blocks": 1,
    "experts": 2,
    "hidden": 6,
    "classes": 4,
}
WIDTHS = {"width": 64, "widths": (8, 16), "strides": (1, 2)}


def tiny(model: Any) -> Any:
    fields = {field.name for field in dataclasses.fields(model)}
    return dataclasses.replace(model, **{k: v for k, v in (TINY | WIDTHS).items() if k in fields})


# Those that differ in their sizes alone are one.
MODELS = {tiny(model): name for name, model in reversed(cases.CASES.items())}


@pytest.mark.parametrize("model", MODELS, ids=MODELS.values())
def test_every_model_agrees_with_vmap(model):
    problem = cases.of_model(model)
    made = {name: tasks.make(name, problem.loss, tasks.TASKS["five"]) for name in (VMAP, PERGRAD)}
    args = problem.params, problem.batch
    executables = {name: timing.compile_one(candidate, *args) for name, candidate in made.items()}
    assert price.largest_difference(executables, *args, unchecked=("sign",)) < 1e-5


def test_every_case_has_a_name_and_a_title():
    assert cases.CASES.keys() == cases.TITLES.keys() == set(get_args(CaseName))
    assert cases.USUAL.keys() == tasks.TASKS.keys() == tasks.TITLES.keys() == set(get_args(TaskName))
    about = cases.of_model(MLP(batch=2, width=3, layers=2)).about
    sizes = {"batch": 2, "width": 3, "layers": 2, "compute": None}
    assert about == {"model": "MLP", **sizes, "parameters": 24}


def test_what_cannot_be_loaded():
    for wrong in ("mlpp", "json:nothing", "no_such_module:loss"):
        with pytest.raises(LabError, match=wrong):
            cases.workload(wrong)


# What is measured.


def test_items():
    every = run.items()
    assert {item.part for item in every} == {"models", "growth", "compile"}
    assert len(set(every)) == len(every)
    assert [(item.case, item.task) for item in run.items((), ("mlp",), ("five", "norms"))] == [
        ("mlp", "five"),
        ("mlp", "norms"),
    ]
    usual = {item.case for item in run.items((), (), ("tokens",))}
    assert usual == set(cases.DIFFERENT)
    assert run.items(("compile",), ("mlp",)) == [run.Item("compile", "mlp", "moments")]


def test_bench(tmp_path, capsys, monkeypatch):
    """The command, with all tasks on a user's loss; what is there already is not measured again."""
    monkeypatch.setattr(records, "versions", lambda: {"pergrad": "a commit"})
    out = tmp_path / "new" / "bench"
    command = ["bench", EXAMPLE, "--rounds=2", "--peak", "--out", str(out)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert all(title in " ".join(printed.split()) for title in tasks.TITLES.values())
    assert sorted(path.name for path in out.iterdir()) == [
        "overhead.png",
        "overhead.svg",
        "results.json",
    ]
    log = json.loads((out / "results.json").read_text())
    about = log["about"]
    assert about["versions"] == {"pergrad": "a commit"} and about["settings"]["rounds"] == 2
    assert about["machine"].keys() == {"platform", "processor", "cores", "devices"}
    by_task: dict[str, list[str]] = {}
    for row in tables.measured(log["results"]):
        if (name := tasks.family(row["candidate"])) != JAX_PRIVACY:  # which may be there or not
            by_task.setdefault(row["task"], []).append(name)
        assert row["part"] == "models" and row["model"] == {"model": EXAMPLE, "parameters": 6}
        assert len(row["seconds"]) == 2 and row["minimum"] == min(row["seconds"])
        assert row["temp_bytes"] >= 0 and row["compile_seconds"] > 0 and "process" not in row
        assert row["ratios"].keys() == {"time", "tuned", "memory", "compile"}
        assert row["ratios"]["tuned"] >= row["ratios"]["time"]
        sized = tasks.family(row["candidate"]) in tasks.SIZED
        assert bool(row["tried"]) == sized and (not sized or row["candidate"] in row["tried"])
    every = [*FLOORS, VMAP, *([MICRO_GRAD] if HAS_MICRO_GRAD else []), PERGRAD]
    assert by_task == {
        "moments": every,
        "norms": every,
        "clipped": every,
        "five": every,
        "tokens": [*FLOORS, PERGRAD],
    }
    left_out = [row for row in log["results"] if row["candidate"] == AUTO]
    assert len(left_out) == 5 and all(row["left_out"] == "all at once" for row in left_out)

    monkeypatch.setattr(run, "measure", lambda *args, **options: pytest.fail("it is there"))
    assert cli.main(command) == 0
    assert json.loads((out / "results.json").read_text())["results"] == log["results"]
    monkeypatch.setattr(records, "versions", lambda: {"pergrad": "another commit"})
    monkeypatch.setattr(run, "measure", lambda *args, **options: [])
    assert cli.main(command) == 0
    assert json.loads((out / "results.json").read_text())["results"] == []


def test_growth_and_compilation(monkeypatch):
    monkeypatch.setattr(cases, "SMALL", MLP(batch=2, width=4, layers=1))
    for part in ("growth", "compile"):
        item = run.Item(part, "mlp", "moments", "B", 4)
        rows = tables.measured(run.measure(item, run.Settings(rounds=1), timing.silent))
        assert len(rows) == 3 + HAS_MICRO_GRAD
        assert all(row["model"]["batch"] == row["size"] == 4 for row in rows)
        assert all(row["compile_seconds"] > 0 for row in rows)
        assert all(("seconds" in row) == (part == "growth") for row in rows)


def test_compilation_of_a_model(monkeypatch):
    monkeypatch.setitem(cases.CASES, "mlp", MLP(batch=2, width=4, layers=1))
    rows = run.measure(run.Item("compile", "mlp", "moments"), run.Settings(builds=1), timing.silent)
    assert {row["candidate"] for row in rows} >= {FLOOR, VMAP, PERGRAD}
    (line,) = str(grid.building(rows, cases.TITLES)).splitlines()[2:]
    assert line.startswith("| MLP, B128, 4 x 1024 | ") and line.count("|") == 4 + HAS_MICRO_GRAD + 1


def test_tokens_of_one_position():
    """Where an example has one position, a token is an example, and others can do it."""
    problem = cases.of_model(MLP(batch=2, width=3, layers=1))
    assert {VMAP, MICRO_GRAD} <= set(tasks.names(problem.task("tokens")))
    assert problem.task("moments") is tasks.TASKS["moments"]
    found = price.measure(
        problem.loss,
        problem.task("tokens"),
        *(problem.params, problem.batch),
        names=(FLOOR, VMAP, PERGRAD),
        rounds=1,
        say=timing.silent,
    )
    assert len(found.results) == 3


def test_memory_of_a_process():
    found = peak.in_a_process(EXAMPLE, "norms", PERGRAD)
    assert found.keys() == {"peak_bytes", "before_bytes"}
    assert math.isnan(found["peak_bytes"]) or found["peak_bytes"] >= found["before_bytes"] > 1e7


def test_an_error_in_a_process(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nMemoryError: too large\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(LabError, match="pergrad in a process of its own: MemoryError: too large"):
        peak.in_a_process(EXAMPLE, "norms", PERGRAD)


def test_mistakes(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for wrong in (
        ["--rounds=0"],
        ["nothing"],
        [EXAMPLE, f"--out={tmp_path / 'file' / 'bench'}"],
    ):
        assert cli.main(["bench", *wrong, "--tasks=norms"]) == 1
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("error: ")
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "--tasks=median"])
    assert exit.value.code == 2


# What is told.


def a_row(candidate: str, seconds: float, **more: Any) -> dict[str, Any]:
    head = {"part": "models", "case": "mlp", "task": "moments", "axis": None, "size": None}
    ratios = {"time": seconds, "tuned": 1.1 * seconds, "memory": 2 * seconds, "compile": 1.5}
    numbers = {"minimum": seconds, "quartiles": [seconds] * 3, "temp_bytes": 3e6, "ratios": ratios}
    numbers |= {"lower_seconds": 1.0, "compile_seconds": 2.0}
    return {**head, "candidate": candidate, **numbers, **more}


ROWS = [
    a_row(FLOOR, 1.0, process={"peak_bytes": 5e6, "before_bytes": 1e6}),
    a_row(VMAP, 123.4),
    a_row(f"{MICRO_GRAD}, microbatch 4", 12.34),
    a_row(PERGRAD, 1.25, process={"peak_bytes": 6e6, "before_bytes": 1e6}),
    {"part": "models", "case": "mlp", "task": "moments", "candidate": AUTO, "left_out": "all at once"},
    {"part": "models", "case": "mlp", "task": "moments", "candidate": JAX_PRIVACY, "left_out": "no"},
]


def test_tables():
    names = {VMAP: "v", MICRO_GRAD: "m", JAX_PRIVACY: "p", PERGRAD: "ours", AUTO: "auto", "other": "o"}
    titles = {"mlp": "MLP", "cnn": "CNN"}
    assert str(grid.compared(written.columns(ROWS, names), titles)).splitlines() == [
        "| model | v | m | p | ours | auto | o |",
        "|---|---|---|---|---|---|---|",
        "| MLP | 123 (247) | 12.3 (24.7) | – | 1.25 (2.50) | the same |  |",
    ]
    full = [{**ROWS[0], "candidate": VMAP, "out_of_memory": "20G of 15G"}]
    beside = [*written.columns(ROWS, {PERGRAD: "ours"}, "here"), *written.columns(full, {VMAP: "v"})]
    assert str(grid.compared(beside, titles)).splitlines() == [
        "| model | here, ours | v |",
        "|---|---|---|",
        "| MLP | 1.25 (2.50) | out of memory |",
    ]
    peaks = grid.in_processes(ROWS, {"mlp": "MLP"}, {FLOOR: "f", VMAP: "v", PERGRAD: "p"})
    assert str(peaks).endswith("| MLP | 5 |  | 6 |")
    built = [{**row, "part": "compile"} for row in tables.measured(ROWS)]
    built[-1] |= {"lower_seconds": 1.5, "compile_seconds": 3.0}
    assert str(grid.building(built)).splitlines() == [
        f"| model | `{FLOOR}` | `{VMAP}` | `{MICRO_GRAD}` | `{PERGRAD}` |",
        "|---|---|---|---|---|",
        "| mlp | 3.00 s | 1.00 | 1.00 | 1.50 |",
    ]
    assert not grid.building(ROWS).lines
    shown = printed(140, ROWS)
    assert "1250.0" in shown and "1.25" in shown and "without jax_privacy: no" in shown
    assert "busy" not in shown
    assert "busy" in printed(140, [a_row(FLOOR, 1.0, quartiles=[1.2, 1.6, 1.7])])


def printed(width: int, rows: list[dict[str, Any]], *, terminal: bool = True) -> str:
    file = io.StringIO()
    tables.show(
        Console(file=file, width=width, force_terminal=terminal, color_system=None),
        "title",
        rows,
        tables.RUNS,
    )
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_a_number_is_never_cut(width):
    """Neither in a narrow terminal nor in a pipe, which has the table as wide as it needs."""
    rows = [a_row(row["candidate"], 1234.5678 * i) for i, row in enumerate(tables.measured(ROWS), 1)]
    rows[0]["process"] = {"peak_bytes": 5678e6}
    numbers = [cell for row in rows for cell in tables.RUNS.cells(row)[1:] if cell]
    shown, piped = printed(width, rows), printed(width, rows, terminal=False)
    for text in (shown, piped):
        assert "…" not in text
        assert not [number for number in numbers if number not in " ".join(text.split())]
    assert max(map(len, shown.splitlines())) <= width
    for row in rows:  # a line for each candidate, whole
        assert [
            line for line in piped.splitlines() if all(cell in line for cell in tables.RUNS.cells(row))
        ]


def test_columns_without_numbers_are_not_shown():
    assert "process" in printed(80, ROWS) and "process" not in printed(80, [ROWS[1], ROWS[2]])


def grown(part: str) -> list[dict[str, Any]]:
    return [
        a_row(name, ratio, part=part, axis=axis, size=size)
        for axis in "BT"
        for size in (2, 4)
        for name, ratio in ((FLOOR, 1.0), (PERGRAD, 1.2), (f"{MICRO_GRAD}, microbatch {size}", 3.0))
    ]


def test_figures(tmp_path):
    built = [{**row, "part": "compile"} for row in ROWS]  # of models: in the table, not the figure
    with sheets.checked() as drawn:
        paths = drawings.write([*ROWS, *grown("growth"), *grown("compile"), *built], tmp_path)
    assert len(drawn) == 3
    names = [
        f"{name}{ending}" for name in ("overhead", "growth", "compile") for ending in (".png", ".svg")
    ]
    assert [path.name for path in paths] == names
    assert all(path.stat().st_size > 5000 for path in paths)


def test_the_figure_of_two_chips_shows_auto_where_it_differs(tmp_path, monkeypatch):
    left = [row for row in ROWS if row["candidate"] != AUTO]
    panels = {"measured": [*left, a_row(AUTO, 0.75)], "compiled": ROWS}
    drawn, draw = [], drawings.beside
    monkeypatch.setattr(drawings, "beside", lambda fig, *rest: (drawn.append(fig), draw(fig, *rest)))
    with sheets.checked():
        drawings.write_beside(panels, {"cnn": "CNN", "mlp": "MLP"}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"beside.png", "beside.svg"}
    (fig,) = drawn
    numbers = [ax.child_axes[0].get_yticklabels()[0].get_text() for ax in fig.axes]
    assert numbers == [grid.short(1.1 * 0.75), grid.short(1.1 * 1.25)]
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["MLP"]


def test_the_figure_of_a_table_has_all_of_its_numbers():
    fast = a_row(PERGRAD, 1.25) | {"least_seconds": 0.5, "seconds": 1.0}
    built = [{**row, "part": "compile"} for row in tables.measured(ROWS)]
    titles = {"mlp": "MLP"}
    columns = [
        *written.columns([fast, *ROWS[:3]], {FLOOR: "`grad`", VMAP: "v", PERGRAD: "ours"}, "here"),
        *written.columns(ROWS, {PERGRAD: "ours", "Opacus hooks": "hooks"}, "there"),
    ]
    compared = grid.compared(columns, titles)
    assert str(compared).endswith("| 1.00 (2.00) | 123 (247) | 0.62 to 1.25 (2.50) | 1.25 (2.50) |  |")
    peaks = grid.in_processes(ROWS, titles, {FLOOR: "f", PERGRAD: "p"})
    here = {
        "here, time": {1, 123.4, 0.625, 1.25},
        "here, temporary memory": {2, 246.8, 2.5},
        "there, time": {1.25},
        "there, temporary memory": {2.5},
    }
    of_compiling = {f"seconds of {FLOOR}": {3}, f"multiple of {FLOOR}": {1}}
    for table, numbers in (
        (compared, here),
        (peaks, {"MB": {5, 6}}),
        (grid.building(built), of_compiling),
    ):
        fig = Figure()
        drawings.of_grid(fig, table)
        drawn = {
            ax.get_title("left"): {
                round(x, 6) for line in ax.lines if line.get_marker() != "None" for x in line.get_xdata()
            }
            for ax in fig.axes
        }
        assert drawn == numbers


# The pages.


def test_every_table_of_a_page_has_its_figure():
    text = (pages.ROOT / "docs" / "benchmarks.md").read_text()
    there = written.grids(written.logs())
    assert {
        "beside_cpu",
        "beside_tpu",
        "moments",
        "process",
        "compile",
        "torch_norms",
        "target_five",
    } <= there.keys()
    for name, (_, table) in there.items():
        if str(table) in text:
            assert f"{table}\n\n![" in text and f"(benchmarks/tables/{name}.png)" in text
        assert (written.NUMBERS / "tables" / f"{name}.png").exists()


def test_pages_have_the_numbers_that_were_logged():
    found = written.blocks(written.logs())
    for page in written.PAGES:
        text = page.read_text()
        assert "<!-- bench:" in text
        assert written.fill(page, found) == text, f"{page}: run python -m pergrad.lab.bench.docs"


def test_blocks(tmp_path):
    about = {
        "versions": {"jax": "1.2", "pergrad": "abc1234"},
        "machine": {"cores": 2, "processor": "fast", "platform": "this"},
        "settings": {"rounds": 3, "builds": 2},
        "target": "tpu:v5e",
    }
    grown = [{**ROWS[0], "part": "growth"}]
    torch = [a_row("BackPACK Variance", 2.0, task="variance", case="cnn, no norms")]
    torch += [{**ROWS[-1], "case": "cnn, no norms", "task": "norms", "left_out": "LayerNorm"}]
    built = [{**ROWS[0], "part": "compile"}]
    compiled = [{**ROWS[3], "part": "target", "task": task} for task in tasks.TASKS]
    compiled.append({**ROWS[1], "part": "target"})
    compiled.append({**ROWS[3], "part": "target", "case": "billion"})
    logs = {"models": ROWS, "growth": grown, "compile": built, "torch": torch}
    logs |= {"target": compiled, "v5p": compiled, "v6e": compiled[:1], "h100": compiled}
    found = written.blocks({name: {"about": about, "results": rows} for name, rows in logs.items()})
    names = ("moments", "nothing", "figure_compile", "figure_growth")
    page = "".join(f"<!-- bench: {name} -->\nwhat stood here\n<!-- end -->\n" for name in names)
    (tmp_path / "page.md").write_text(page)
    filled = written.fill(tmp_path / "page.md", found)
    assert "accumulated" not in found["moments"]
    newer = [*ROWS, a_row(f"{ACCUMULATED}, microbatch 2", 0.95)]
    logs["models"] = newer
    again = written.blocks({name: {"about": about, "results": rows} for name, rows in logs.items()})
    assert again["moments"].startswith("| model | accumulated `grad` |")
    assert "| 0.95 (1.90) |" in again["moments"]
    assert "123 (247)" in filled and "docs/benchmarks/growth/growth.png)" in filled
    assert "docs/benchmarks/compile/compile.png)" in filled
    assert filled.count("what stood here") == 1 and filled.count("<!-- ") == 8
    assert "CNN, B64, 32x32, 3-32-64-64, no norms |" in found["torch_variance"]
    assert found["torch_left_out"] == f"- {JAX_PRIVACY}: `LayerNorm`"
    assert (
        found["measured"].startswith("`pergrad bench --parts models`")
        and "3 rounds" in found["measured"]
        and "jax 1.2" in found["measured"]
    )
    assert found["target_compiled"].startswith("`pergrad bench --target tpu:v5e`, compiled for, not run")
    assert "| `abc1234` | all |" in found["measured"] and "</details>" in found["measured"]
    later = [{**ROWS[0], "task": task, written.AGAIN: "def5678"} for task in ("moments", "norms")]
    said = written.details({"about": about, "results": [*ROWS, *later, *later]})
    assert "| `abc1234` | all others |\n| `def5678` | mlp: moments, norms |" in said
    said = written.details({"about": about, "results": later})
    assert "others" not in said and "| pergrad | rows |\n|---|---|\n| `def5678` |" in said
    assert "L22 V32768 |" in found["target_moments"] and "L22 V32768 |" in again["beside_tpu"]
    assert (
        "take 1.38 to 1.38 times" in found["in_words"]
        and "(the highest number: MLP" in found["in_words"]
    )
    assert "| 1.38 (2.50) |" in found["beside_cpu"] and "| 1.38 (2.50) |" in found["beside_tpu"]
    assert "v6e" in found["further_moments"] and "v6e" not in found["further_norms"]
    names = {name for page in written.PAGES for name, *_ in written.BLOCK.findall(page.read_text())}
    assert names <= found.keys()
    assert "2 builds" in found["compile_measured"] and "3 rounds" in found["growth_measured"]


def test_newer_rows_take_the_place_of_older_ones():
    def log(commit: str, *rows: dict[str, Any]) -> dict[str, Any]:
        return {"about": {"versions": {"pergrad": commit, "jax": "1.2"}}, "results": list(rows)}

    def compiled(commit: str, *rows: dict[str, Any]) -> dict[str, Any]:
        made = log(commit, *rows)
        return made | {"about": made["about"] | {"target": "tpu:v5e"}}

    old, new, rival = a_row(PERGRAD, 1.2), a_row(PERGRAD, 1.1), a_row(f"{MICRO_GRAD}, microbatch 2", 3.0)
    again = {**new, written.AGAIN: "def5678"}
    newer = log("def5678", new)
    assert written.replaced(log("abc1234", old, rival), newer)["results"] == [again]
    found = written.replaced(compiled("abc1234", old, rival), compiled("def5678", new))
    assert found["results"] == [rival, again]  # programs that were compiled do not depend on each other
    assert found["about"]["versions"]["pergrad"] == "abc1234"
    assert written.replaced(newer, newer)["results"] == [new]  # of the commit of the log itself
    with pytest.raises(LabError, match="alike"):
        written.replaced(log("abc1234", old), compiled("abc1234", new))
