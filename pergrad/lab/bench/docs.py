"""Write the numbers of a benchmark into the pages that show them.

    pergrad bench --parts models --out docs/benchmarks
    pergrad bench --parts growth --out docs/benchmarks/growth
    pergrad bench --parts compile --out docs/benchmarks/compile
    python -m pergrad.lab.bench.torch_side_by_side --out docs/benchmarks/torch.json
    pergrad bench --target tpu:v5e --out docs/benchmarks
    python -m pergrad.lab.bench.docs

After a change that concerns few models, measure those again, and put their rows in the place of the old
ones. The pages then name the commit of each:

    pergrad bench --cases transformer_scanned --tasks moments --out again
    python -m pergrad.lab.bench.docs again/results.json

A page has a comment where a table begins, `<!-- bench: NAME -->`, and one where it ends, `<!-- end -->`.
This command writes the text between them, from the JSON files in docs/benchmarks, and draws the figures
beside those files again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pergrad.lab.bench import cases, drawings, tables, tasks
from pergrad.lab.bench.tables import Column, Row
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
}
AGAIN = "measured_at"  # in a row that was measured again: the commit of pergrad
COMMAND = "pergrad bench --parts"
FIGURES = "{figures}"  # stands for the path of the figures from the page
BLOCK = re.compile(r"(?<=<!-- bench: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

OURS = {PERGRAD: "pergrad", AUTO: '`microbatch_size="auto"`'}
RIVALS = {ACCUMULATED: "accumulated `grad`", VMAP: "`vmap(grad)`", MICRO_GRAD: "optax `micro_grad`"}
# What the README shows of the CPU and of the TPU, beside each other.
SHOWN = {VMAP: "`vmap(grad)`", MICRO_GRAD: "`micro_grad`", PERGRAD: "pergrad", AUTO: '`"auto"`'}
COLUMNS: dict[str, dict[str, str]] = {
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


def blocks(logs: Mapping[str, Any]) -> dict[str, str]:
    """The text of each block, by its name, from the logs that are there (see `LOGS`)."""
    found = {}
    titles: dict[str, str] = {**cases.TITLES}
    if "models" in logs:
        rows = logs["models"]["results"]
        for task, names in COLUMNS.items():
            own = of_task(rows, task)
            found[task] = tables.markdown(columns(own, names), titles)
            if task == "moments":
                shown = {column.candidate: column.title for column in columns(own, names)}
                found["process"] = tables.in_processes(own, titles, {FLOOR: "`jax.grad`"} | shown)
        found["measured"] = measured(f"{COMMAND} models", logs["models"])
        found |= links(rows, FIGURES)
    if "target" in logs:
        rows = logs["target"]["results"]
        everything = titles | cases.LARGE_TITLES
        for task, names in COLUMNS.items():
            if own := of_task(rows, task):
                found[f"target_{task}"] = tables.markdown(columns(own, names), everything)
        found["target_compiled"] = compiled(logs["target"])
    if "models" in logs and "target" in logs:
        run, only_compiled = (of_task(logs[name]["results"], "moments") for name in ("models", "target"))
        beside = columns(run, SHOWN, "CPU, ") + columns(only_compiled, SHOWN, "TPU, ")
        found["beside"] = tables.markdown(beside, titles)
    if "growth" in logs:
        found["growth_measured"] = measured(f"{COMMAND} growth", logs["growth"])
        found |= links(logs["growth"]["results"], f"{FIGURES}/growth")
    if "compile" in logs:
        rows = logs["compile"]["results"]
        found["compile"] = tables.building(rows, titles)
        found["compile_measured"] = measured(f"{COMMAND} compile", logs["compile"], "builds")
        found |= links(rows, f"{FIGURES}/compile")
    if "torch" in logs:
        rows = logs["torch"]["results"]
        in_torch = {row["case"]: torch_title(row["case"]) for row in rows}
        for task, names in TORCH.items():
            found[f"torch_{task}"] = tables.markdown(columns(of_task(rows, task), names), in_torch)
        found["torch_measured"] = measured("make bench-torch", logs["torch"])
        found["torch_left_out"] = left_out(rows)
    return found


def of_task(rows: Iterable[Row], task: str) -> list[Row]:
    return [row for row in rows if row["task"] == task]


def columns(rows: Sequence[Row], names: Mapping[str, str], before: str = "") -> list[Column]:
    """A column for each candidate in `names`, whose titles have the text `before` in front.

    There is none for accumulated gradients if some rows are older than this candidate.
    """
    having = {row["case"] for row in rows if family(row["candidate"]) == ACCUMULATED}
    unlogged = () if having == {row["case"] for row in rows} else (ACCUMULATED,)
    return [
        Column(f"{before}{title}", name, rows) for name, title in names.items() if name not in unlogged
    ]


def compiled(log: Mapping[str, Any]) -> str:
    """A sentence on how programs were compiled: the command and the versions."""
    target = log["about"]["target"]
    return f"`pergrad bench --target {target}`, compiled for, not run on; {versions(log)}."


def versions(log: Mapping[str, Any]) -> str:
    found = log["about"]["versions"].items()
    return ", ".join(f"{name} {version}" for name, version in found if name != "numpy")


def links(rows: Iterable[Mapping[str, Any]], folder: str) -> dict[str, str]:
    """Links to the figures of the parts that have rows, by the name of the block."""
    parts = {row["part"] for row in rows}
    return {
        f"figure_{name}": f"![{title}]({folder}/{name}.png)"
        for name, (part, title) in drawings.TITLES.items()
        if part in parts
    }


def torch_title(case: str) -> str:
    name, _, rest = case.partition(", ")
    return f"{cases.TITLES[name]}{rest and f', {rest}'}"  # type: ignore[index]


def measured(command: str, log: Mapping[str, Any], times: str = "rounds") -> str:
    """A sentence on how a log was measured: the command, the machine and the versions."""
    machine = log["about"]["machine"]
    how = f"at most {log['about']['settings'][times]} {times}"
    where = f"{machine['cores']} cores ({machine['processor']}, {machine['platform']})"
    again = {(row["case"], row["task"]): row[AGAIN] for row in log["results"] if AGAIN in row}
    later = "".join(f"; {case}, {task}: pergrad {at}" for (case, task), at in again.items())
    return f"`{command}`, the fastest of {how} on {where}; {versions(log)}{later}."


def replaced(log: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """The log with the comparisons of a newer log in the place of its own.

    The other packages, the machine and the settings must be the same.
    """
    about, at = (entry["about"] for entry in (log, newer)), newer["about"]["versions"]["pergrad"]
    old, new = ({**a, "versions": {**a["versions"], "pergrad": ""}} for a in about)
    if old != new:
        raise LabError(f"The two logs were not measured alike: {old} and {new}.")
    measured_again = {(row["part"], row["case"], row["task"]) for row in newer["results"]}
    kept = [r for r in log["results"] if (r["part"], r["case"], r["task"]) not in measured_again]
    rows = kept + [{**row, AGAIN: at} for row in newer["results"]]
    order = {name: place for place, name in enumerate([*cases.CASES, *tasks.TASKS])}
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
    for newer in sys.argv[1:]:
        path = LOGS["models"]
        records.write_json(path, replaced(records.read_json(path), records.read_json(Path(newer))))
    there = logs()
    found = blocks(there)
    for page in PAGES:
        page.write_text(fill(page, found))
    for name in there.keys() - {"torch", "target"}:
        drawings.write(there[name]["results"], LOGS[name].parent)


if __name__ == "__main__":
    main()
