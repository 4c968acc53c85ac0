"""Write the numbers of a benchmark into the pages that show them.

    pergrad bench --parts models --out docs/benchmarks
    pergrad bench --parts growth --out docs/benchmarks/growth
    pergrad bench --parts compile --out docs/benchmarks/compile
    python -m pergrad.lab.bench.torch_side_by_side --out docs/benchmarks/torch.json
    pergrad bench --target tpu:v5e --out docs/benchmarks
    pergrad bench --target tpu:v5p --cases large_transformer_scanned --ours --out docs/benchmarks
    python -m pergrad.lab.bench.docs

After a change that concerns few models, measure those again, and put their rows in the place of the old
ones. The pages then name the commit of each:

    pergrad bench --cases transformer_scanned --tasks moments --out again
    pergrad bench --target tpu:v5e --cases transformer_scanned --tasks moments --out again
    python -m pergrad.lab.bench.docs again/results.json again/tpu-v5e.json

A page has a comment where a table begins, `<!-- bench: NAME -->`, and one where it ends, `<!-- end -->`.
This command writes the text between them, from the JSON files in docs/benchmarks, and draws the figures
beside those files again.
"""

from __future__ import annotations

import dataclasses
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
    "v5p": NUMBERS / "tpu-v5p.json",
    "v6e": NUMBERS / "tpu-v6e.json",
    "h100": NUMBERS / "gpu-h100.json",
}
# Chips for which only some of the models are compiled, without other packages.
FURTHER = {"v5p": "v5p", "v6e": "v6e", "h100": "H100"}
AGAIN = "measured_at"  # in a row that was measured again: the commit of pergrad
COMMAND = "pergrad bench --parts"
FIGURES = "{figures}"  # stands for the path of the figures from the page
BLOCK = re.compile(r"(?<=<!-- bench: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

TITLES: dict[str, str] = {**cases.TITLES}
OURS = {PERGRAD: "pergrad", AUTO: '`microbatch_size="auto"`'}
RIVALS = {ACCUMULATED: "accumulated `grad`", VMAP: "`vmap(grad)`", MICRO_GRAD: "optax `micro_grad`"}
# What the README shows of the CPU and of the TPU, beside each other.
SHOWN = {
    FLOOR: "`grad`",
    VMAP: "`vmap(grad)`",
    MICRO_GRAD: "`micro_grad`",
    PERGRAD: "pergrad",
    AUTO: '`"auto"`',
}
# The panels of the README's figure, by the log that has their numbers.
PANELS = {"models": "CPU with two cores, measured", "target": "TPU v5e, compiled for, not run on"}
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
    makers = {
        "models": _of_models,
        "target": _of_target,
        "growth": _of_growth,
        "compile": _of_compilation,
        "torch": _of_torch,
    }
    found: dict[str, str] = {}
    for name, make in makers.items():
        if name in logs:
            found |= make(logs[name])
    found |= _of_further({name: log for name, log in logs.items() if name in FURTHER})
    if "models" in logs and "target" in logs:
        run, only_compiled = (of_task(logs[name]["results"], "moments") for name in ("models", "target"))
        beside = columns(run, SHOWN, "CPU, ") + columns(only_compiled, SHOWN, "TPU, ")
        found["beside"] = tables.markdown(tuned(beside), cases.EVERY_TITLE)
        found["figure_beside"] = link(drawings.BESIDE_NAME, drawings.BESIDE_TITLE, FIGURES)
    return found


def _of_models(log: Mapping[str, Any]) -> dict[str, str]:
    found, rows = {}, log["results"]
    for task, names in COLUMNS.items():
        found[task] = tables.markdown(columns(of_task(rows, task), names), TITLES)
    moments = of_task(rows, "moments")
    shown = {column.candidate: column.title for column in columns(moments, COLUMNS["moments"])}
    found["process"] = tables.in_processes(moments, TITLES, {FLOOR: "`jax.grad`"} | shown)
    found["measured"] = measured(f"{COMMAND} models", log)
    return found | links(rows, FIGURES)


def _of_target(log: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for task, names in COLUMNS.items():
        if own := of_task(log["results"], task):
            there = {name for row in own for name in (row["candidate"], family(row["candidate"]))}
            shown = {name: title for name, title in names.items() if name in there}
            found[f"target_{task}"] = tables.markdown(columns(own, shown), cases.EVERY_TITLE)
    return found | {"target_compiled": compiled(log)}


def _of_further(logs: Mapping[str, Any]) -> dict[str, str]:
    found, shown = {}, {ACCUMULATED: "accumulated `grad`"} | OURS
    for task in COLUMNS:
        each = [
            column
            for name, log in logs.items()
            for column in columns(of_task(log["results"], task), shown, f"{FURTHER[name]}, ")
        ]
        if any(column.rows for column in each):
            found[f"further_{task}"] = tables.markdown(each, cases.EVERY_TITLE)
    found["further_compiled"] = "\n".join(f"- {compiled(log)}" for log in logs.values())
    return found


def _of_growth(log: Mapping[str, Any]) -> dict[str, str]:
    sentence = measured(f"{COMMAND} growth", log)
    return {"growth_measured": sentence} | links(log["results"], f"{FIGURES}/growth")


def _of_compilation(log: Mapping[str, Any]) -> dict[str, str]:
    found = {
        "compile": tables.building(log["results"], TITLES),
        "compile_measured": measured(f"{COMMAND} compile", log, "builds"),
    }
    return found | links(log["results"], f"{FIGURES}/compile")


def _of_torch(log: Mapping[str, Any]) -> dict[str, str]:
    rows = log["results"]
    in_torch = {row["case"]: torch_title(row["case"]) for row in rows}
    found = {"torch_measured": measured("make bench-torch", log), "torch_left_out": left_out(rows)}
    for task, names in TORCH.items():
        found[f"torch_{task}"] = tables.markdown(columns(of_task(rows, task), names), in_torch)
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


def tuned(columns: Iterable[Column]) -> list[Column]:
    """The columns with times as multiples of the fastest way to the mean gradient alone.

    There is none for accumulated gradients, which are that way or are slower than `jax.grad`.
    """
    others = (column for column in columns if column.candidate != ACCUMULATED)
    return [dataclasses.replace(column, ratio="tuned") for column in others]


def compiled(log: Mapping[str, Any]) -> str:
    """A sentence on how programs were compiled: the command and the versions."""
    target = log["about"]["target"]
    return f"`pergrad bench --target {target}`, compiled for, not run on; {versions(log)}{later(log)}."


def later(log: Mapping[str, Any]) -> str:
    """Which comparisons of a log are of another commit of pergrad than the log, and of which."""
    again: dict[str, list[str]] = {}
    for row in log["results"]:
        if AGAIN in row:
            again.setdefault(row[AGAIN], []).append(f"{row['case']}, {row['task']}")
    each = (f"; pergrad {at}: {'; '.join(dict.fromkeys(those))}" for at, those in again.items())
    return "".join(each)


def versions(log: Mapping[str, Any]) -> str:
    found = log["about"]["versions"].items()
    return ", ".join(f"{name} {version}" for name, version in found if name != "numpy")


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


def measured(command: str, log: Mapping[str, Any], times: str = "rounds") -> str:
    """A sentence on how a log was measured: the command, the machine and the versions."""
    machine = log["about"]["machine"]
    how = f"at most {log['about']['settings'][times]} {times}"
    where = f"{machine['cores']} cores ({machine['processor']}, {machine['platform']})"
    return f"`{command}`, the fastest of {how} on {where}; {versions(log)}{later(log)}."


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
    rows = kept + [{**row, AGAIN: at} for row in newer["results"]]
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
    for name in there.keys() - {"torch", "target", *FURTHER}:
        drawings.write(there[name]["results"], LOGS[name].parent)
    if "models" in there and "target" in there:
        panels = {title: there[name]["results"] for name, title in PANELS.items()}
        drawings.write_beside(panels, cases.EVERY_TITLE, NUMBERS)


if __name__ == "__main__":
    main()
