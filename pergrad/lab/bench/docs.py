"""Write the numbers of a benchmark into the pages that show them.

    pergrad bench --parts models --out docs/benchmarks
    pergrad bench --parts growth --out docs/benchmarks/growth
    pergrad bench --parts compile --out docs/benchmarks/compile
    python -m pergrad.lab.bench.torch_side_by_side --out docs/benchmarks/torch.json
    pergrad bench --target tpu:v5e --out docs/benchmarks
    pergrad bench --target tpu:v5p --cases billion --tasks moments clipped --ours --out docs/benchmarks
    python -m pergrad.lab.bench.docs

After a change that concerns few models, measure those again, and put their rows in the place of the old
ones. The pages then name the commit of each:

    pergrad bench --cases transformer_scanned --tasks moments --out again
    pergrad bench --target tpu:v5e --cases transformer_scanned --tasks moments --out again
    python -m pergrad.lab.bench.docs again/results.json again/tpu-v5e.json

A page has a comment where a table begins, `<!-- bench: NAME -->`, and one where it ends, `<!-- end -->`.
This command writes the text between them, from the JSON files in docs/benchmarks, and draws the figures
beside those files again. Below every table is a figure that has all of its numbers.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pergrad.lab.bench import cases, drawings, tasks
from pergrad.lab.bench.grid import Column, Grid, building, compared, in_processes, pipes, short
from pergrad.lab.bench.tables import Row
from pergrad.lab.bench.tasks import (
    ACCUMULATED,
    AUTO,
    FLOOR,
    JAX_PRIVACY,
    MICRO_GRAD,
    PERGRAD,
    VMAP,
    family,
)
from pergrad.lab.config import CaseName, LargeName, TaskName
from pergrad.lab.errors import LabError
from pergrad.lab.run import records

ROOT = Path(__file__).parents[3]
NUMBERS = ROOT / "docs" / "benchmarks"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
LOGS = {
    "models": NUMBERS / "results.json",
    "growth": NUMBERS / "growth" / "results.json",
    "compile": NUMBERS / "compile" / "results.json",
    "torch": NUMBERS / "torch.json",
    "target": NUMBERS / "tpu-v5e.json",
    "v5p": NUMBERS / "tpu-v5p.json",
    "v6e": NUMBERS / "tpu-v6e.json",
    "h100": NUMBERS / "gpu-h100.json",
}
# Chips that have tables of their own: the name of the blocks, and the words for the chip, by log.
OWN_TABLES = {"target": ("target", "a TPU v5e"), "h100": ("gpu", "an H100")}
# Chips that share tables. Only some of the models are compiled for them, without other packages.
FURTHER = {"v5p": "v5p", "v6e": "v6e"}
AGAIN = "measured_at"  # in a row that was measured again: the commit of pergrad
COMMAND = "pergrad bench --parts"
FIGURES = "{figures}"  # stands for the path of the figures from the page
TABLES = "tables"  # the folder of the figures that draw tables
BLOCK = re.compile(r"(?<=<!-- bench: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

TITLES: dict[str, str] = {**cases.TITLES}
OURS = {PERGRAD: "pergrad", AUTO: '`microbatch_size="auto"`'}
RIVALS = {ACCUMULATED: "accumulated `grad`", VMAP: "`vmap(grad)`", MICRO_GRAD: "optax `micro_grad`"}
# The chips of the first tables, with their logs, and the candidates there.
CHIPS = {"cpu": ("models", "on the CPU"), "tpu": ("target", "compiled for a TPU v5e")}
SHOWN = {
    FLOOR: "`grad`",
    VMAP: "`vmap(grad)`",
    MICRO_GRAD: "`micro_grad`",
    PERGRAD: "pergrad",
    AUTO: '`"auto"`',
}
# The models of the README's figure, one of each kind, and its panels by the log that has their numbers.
FEW: tuple[CaseName | LargeName, ...] = (
    *("mlp", "cnn", "lstm", "transformer_long", "experts"),
    "large_transformer_scanned",
)
PANELS = {"models": "CPU with two cores, measured", "target": "TPU v5e, compiled for, not run on"}
COLUMNS: dict[TaskName, dict[str, str]] = {
    "moments": RIVALS | OURS,
    "norms": RIVALS | OURS,
    "clipped": RIVALS | {JAX_PRIVACY: "`jax_privacy`"} | OURS,
    "five": RIVALS | OURS,
    "tokens": RIVALS | OURS,
}
TORCH_VMAP = {"torch.func vmap(grad)": "`torch.func.vmap(grad)`"}
HOOKS = {"Opacus hooks": "Opacus, hooks"}
TORCH: dict[str, dict[str, str]] = {
    "moments": TORCH_VMAP | HOOKS | {"BackPACK SumGradSquared": "BackPACK `SumGradSquared`"},
    "variance": TORCH_VMAP | HOOKS | {"BackPACK Variance": "BackPACK `Variance`"},
    "norms": TORCH_VMAP | HOOKS | {"BackPACK BatchL2Grad": "BackPACK `BatchL2Grad`"},
    "clipped": TORCH_VMAP | HOOKS | {"Opacus ghost clipping": "Opacus, ghost clipping"},
}
TORCH_TITLES = {
    "moments": "Mean and second moment",
    "variance": "Variance",
    "norms": "Norms",
    "clipped": "Clipped mean",
}


def blocks(logs: Mapping[str, Any]) -> dict[str, str]:
    """The text of each block, by its name, from the logs that are there (see `LOGS`)."""
    makers = {
        "models": lambda log: _about("measured", f"{COMMAND} models", log),
        "growth": lambda log: _about("growth_measured", f"{COMMAND} growth", log, f"{FIGURES}/growth"),
        "compile": lambda log: _about(
            "compile_measured", f"{COMMAND} compile", log, f"{FIGURES}/compile", "builds"
        ),
        "torch": lambda log: {
            "torch_measured": measured("make bench-torch", log),
            "torch_left_out": left_out(log["results"]),
        },
    }
    makers |= {
        name: lambda log, block=block: {f"{block}_compiled": compiled(log)}
        for name, (block, _) in OWN_TABLES.items()
    }
    found: dict[str, str] = {}
    for name, make in makers.items():
        if name in logs:
            found |= make(logs[name])
    further = [compiled(log) for name, log in logs.items() if name in FURTHER]
    found["further_compiled"] = "\n\n".join(further)
    for name, (title, grid) in grids(logs).items():
        found[name] = f"{grid}\n\n{link(name, title, f'{FIGURES}/{TABLES}')}"
    if "models" in logs and "target" in logs:
        found["in_words"] = in_words(logs)
        found["figure_beside"] = link(drawings.BESIDE_NAME, drawings.BESIDE_TITLE, FIGURES)
    return found


def _about(
    name: str, command: str, log: Mapping[str, Any], folder: str = FIGURES, times: str = "rounds"
) -> dict[str, str]:
    """How a log was measured, in the block `name`, and links to its figures in their blocks."""
    return {name: measured(command, log, times)} | links(log["results"], folder)


def grids(logs: Mapping[str, Any]) -> dict[str, tuple[str, Grid]]:
    """The tables by the names of their blocks, each with the title of its figure."""
    found: dict[str, tuple[str, Grid]] = {}
    if "models" in logs:
        rows = logs["models"]["results"]
        for task, names in COLUMNS.items():
            own = compared(columns(of_task(rows, task), names), TITLES)
            found[task] = f"{_title(task)}, on the CPU", own
        moments = of_task(rows, "moments")
        shown = {column.candidate: column.name for column in columns(moments, COLUMNS["moments"])}
        peaks = in_processes(moments, TITLES, {FLOOR: "`jax.grad`"} | shown)
        found["process"] = "Peak memory of a process", peaks
    if "compile" in logs:
        title = "Time to trace and compile"
        found["compile"] = title, building(logs["compile"]["results"], TITLES)
    if "torch" in logs:
        rows = logs["torch"]["results"]
        in_torch = {row["case"]: torch_title(row["case"]) for row in rows}
        for task, names in TORCH.items():
            own = compared(columns(of_task(rows, task), names), in_torch)
            found[f"torch_{task}"] = f"{TORCH_TITLES[task]}, in PyTorch", own
    for name, (block, chip) in OWN_TABLES.items():
        if name in logs:
            found |= _of_chip(logs[name]["results"], block, chip)
    found |= _of_further({name: log for name, log in logs.items() if name in FURTHER})
    for chip, (log, where) in CHIPS.items():
        if log in logs:
            each = tuned(columns(of_task(logs[log]["results"], "moments"), SHOWN))
            title = f"{_title('moments')}, {where}, beside the tuned mean gradient"
            found[f"beside_{chip}"] = title, compared(each, cases.EVERY_TITLE)
    return found


def in_words(logs: Mapping[str, Any]) -> str:
    """The range of times on each chip, as multiples of the fastest way to the mean gradient alone."""
    where = {"models": "Measured on the CPU", "target": "By the compiler for a TPU v5e"}
    said = []
    for log, words in where.items():
        rows = drawings.at_auto(logs[log]["results"])
        times: dict[str, dict[str, float]] = {PERGRAD: {}, VMAP: {}}  # by candidate and case
        for row in rows:
            if row["candidate"] in times:
                times[row["candidate"]][row["case"]] = row["ratios"]["tuned"]
        ours, theirs = times.values()
        dearest = cases.EVERY_TITLE[max(ours, key=lambda case: ours[case])]
        said.append(
            f"{words}, mean and second moment take {short(min(ours.values()))} to "
            f"{short(max(ours.values()))} times as long as the mean gradient alone (the highest number: "
            f"{dearest}). With `vmap(grad)` they take {short(min(theirs.values()))} to "
            f"{short(max(theirs.values()))} times as long."
        )
    return "\n".join(f"- {sentence}" for sentence in said)


def _title(task: TaskName) -> str:
    words = tasks.TITLES[task]
    return words[0].upper() + words[1:]


def _of_chip(rows: Sequence[Row], block: str, chip: str) -> dict[str, tuple[str, Grid]]:
    found = {}
    for task, names in COLUMNS.items():
        if own := of_task(rows, task):
            there = {name for row in own for name in (row["candidate"], family(row["candidate"]))}
            shown = {name: title for name, title in names.items() if name in there}
            grid = compared(columns(own, shown), cases.EVERY_TITLE)
            found[f"{block}_{task}"] = f"{_title(task)}, compiled for {chip}", grid
    return found


def _of_further(logs: Mapping[str, Any]) -> dict[str, tuple[str, Grid]]:
    found, shown = {}, {ACCUMULATED: "accumulated `grad`"} | OURS
    for task in COLUMNS:
        each = [
            column
            for name, log in logs.items()
            if (own := of_task(log["results"], task))
            for column in columns(own, shown, FURTHER[name])
        ]
        if each:
            title = f"{_title(task)}, compiled for other chips"
            found[f"further_{task}"] = title, compared(each, cases.EVERY_TITLE)
    return found


def of_task(rows: Iterable[Row], task: str) -> list[Row]:
    return [row for row in rows if row["task"] == task]


def columns(rows: Sequence[Row], names: Mapping[str, str], chip: str = "") -> list[Column]:
    """A column for each candidate in `names`, on a chip if a table has several.

    There is none for accumulated gradients if some rows are older than this candidate.
    """
    having = {row["case"] for row in rows if family(row["candidate"]) == ACCUMULATED}
    unlogged = () if having == {row["case"] for row in rows} else (ACCUMULATED,)
    return [
        Column(title, name, rows, chip=chip) for name, title in names.items() if name not in unlogged
    ]


def tuned(columns: Iterable[Column]) -> list[Column]:
    """The columns with times as multiples of the fastest way to the mean gradient alone.

    There is none for accumulated gradients, which are that way or are slower than `jax.grad`.
    """
    others = (column for column in columns if column.candidate != ACCUMULATED)
    return [dataclasses.replace(column, ratio="tuned") for column in others]


def compiled(log: Mapping[str, Any]) -> str:
    """How programs were compiled: the command, and folded up the versions and commits."""
    versions, target = log["about"]["versions"], log["about"]["target"]
    libtpu = f" and libtpu {versions['libtpu']}" if "libtpu" in versions else ""
    said = f"compiled for, not run on, with jax {versions['jax']}{libtpu}"
    return f"`pergrad bench --target {target}`, {said}.\n\n{details(log)}"


def measured(command: str, log: Mapping[str, Any], times: str = "rounds") -> str:
    """How a log was measured: the command and the machine, and folded up the versions and commits."""
    about = log["about"]
    machine, versions = about["machine"], about["versions"]
    how = f"at most {about['settings'][times]} {times}"
    where = f"{machine['cores']} cores ({machine['processor']}, {machine['platform']})"
    return f"`{command}`, the fastest of {how} on {where}, with jax {versions['jax']}.\n\n{details(log)}"


def details(log: Mapping[str, Any]) -> str:
    """The versions of all packages, and the commit of pergrad at which each row was made."""
    versions = log["about"]["versions"]
    others = ", ".join(
        f"{name} {version}" for name, version in versions.items() if name not in ("pergrad", "numpy")
    )
    again: dict[str, dict[str, list[str]]] = {}  # tasks, by commit and case
    for row in log["results"]:
        if AGAIN in row:
            at_case = again.setdefault(row[AGAIN], {}).setdefault(row["case"], [])
            at_case += [row["task"]] * (row["task"] not in at_case)
    lines = [["pergrad", "rows"]]
    if not all(AGAIN in row for row in log["results"]):
        lines.append([f"`{versions['pergrad']}`", "all" if not again else "all others"])
    for commit, of_case in again.items():
        each = "; ".join(f"{case}: {', '.join(own)}" for case, own in of_case.items())
        lines.append([f"`{commit}`", each])
    return (
        '<details markdown="1">\n<summary>Versions, and commits of pergrad</summary>\n\n'
        f"{others}.\n\n{pipes(lines)}\n\n</details>"
    )


def links(rows: Iterable[Mapping[str, Any]], folder: str) -> dict[str, str]:
    """Links to the figures of the parts that have rows, by the name of the block."""
    parts = {row["part"] for row in rows}
    return {
        f"figure_{name}": link(name, title, folder)
        for name, (part, title) in drawings.TITLES.items()
        if part in parts
    }


def link(name: str, title: str, folder: str) -> str:
    return f"![{title}]({folder}/{name}.png)"


def torch_title(case: str) -> str:
    name, _, rest = case.partition(", ")
    return f"{cases.TITLES[name]}{rest and f', {rest}'}"  # type: ignore[index]


def replaced(log: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """The log with the comparisons of a newer log in the place of its own.

    The other packages, the machine and the settings must be the same. Of programs that were only
    compiled, candidates that the newer log does not have stay.
    """
    about, at = (entry["about"] for entry in (log, newer)), newer["about"]["versions"]["pergrad"]
    old, new = ({**a, "versions": {**a["versions"], "pergrad": ""}} for a in about)
    if old != new:
        raise LabError(f"The two logs were not measured alike: {old} and {new}.")
    is_compiled = "target" in log["about"]  # then candidates do not depend on each other

    def comparison(row: Row) -> tuple[str, ...]:
        own = (family(row["candidate"]),) if is_compiled else ()
        return row["part"], row["case"], row["task"], *own

    measured_again = set(map(comparison, newer["results"]))
    kept = [row for row in log["results"] if comparison(row) not in measured_again]
    again = {} if at == log["about"]["versions"]["pergrad"] else {AGAIN: at}
    rows = kept + [row | again for row in newer["results"]]
    order = {name: place for place, name in enumerate([*cases.EVERY_TITLE, *tasks.TASKS])}
    rows.sort(key=lambda row: (order[row["case"]], order[row["task"]]))
    return {"about": log["about"], "results": rows}


def left_out(rows: list[Mapping[str, Any]]) -> str:
    """A list of what packages say they cannot do, each message once."""
    said = {f"{row['candidate']}: `{row['left_out']}`": None for row in rows if "left_out" in row}
    return "\n".join(f"- {line}" for line in said) or "Nothing was left out."


def fill(page: Path, found: Mapping[str, str]) -> str:
    """The page, with new text in all blocks that there are numbers for."""
    figures = os.path.relpath(NUMBERS, page.parent)

    def block(match: re.Match[str]) -> str:
        name, mark, old = match.groups()
        return name + mark + (found[name].replace(FIGURES, figures) + "\n" if name in found else old)

    return BLOCK.sub(block, page.read_text())


def logs() -> dict[str, Any]:
    return {name: records.read_json(path) for name, path in LOGS.items() if path.exists()}


def main() -> None:
    for name in sys.argv[1:]:
        newer = records.read_json(Path(name))
        target = newer["about"].get("target")
        path = NUMBERS / f"{target.replace(':', '-')}.json" if target else LOGS["models"]
        if path.exists():
            newer = replaced(records.read_json(path), newer)
        records.write_json(path, newer)
    there = logs()
    found = blocks(there)
    for page in PAGES:
        page.write_text(fill(page, found))
    for name in there.keys() - {"torch", *OWN_TABLES, *FURTHER}:
        drawings.write(there[name]["results"], LOGS[name].parent)
    for name, (title, grid) in grids(there).items():
        drawings.write_grid(title, grid, NUMBERS / TABLES / f"{name}.png")
    if "models" in there and "target" in there:
        panels = {title: there[name]["results"] for name, title in PANELS.items()}
        few = {name: cases.EVERY_TITLE[name] for name in FEW}
        drawings.write_beside(panels, few, NUMBERS)


if __name__ == "__main__":
    main()
