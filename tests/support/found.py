"""The tables of docs/studies.md, made from the results that were kept of the studies.

    python -m tests.support.found studies/sign-quick studies/adam-quick

keeps the results of these directories, which `pergrad study` has written, and then writes the tables of
all studies whose results are kept into the page. A table stands between two lines: `<!-- found:
sign-quick 0 -->`, with the name of the results and the number of the table, and `<!-- end -->`. The rule
of each study is the study's own: these functions only read its results and write Markdown.
"""

import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.lab.compare import decide
from pergrad.lab.compare.sweep import TUNING_SEED, Tuned
from pergrad.lab.config import Train
from pergrad.lab.pages import findings, report
from pergrad.lab.studies import (
    STUDIES,
    _agreement,
    _found,
    _points,
    adam,
    argument,
    arms,
    clipping,
    law,
    overhead,
    plane,
    quantile,
    ramp,
    rivals,
    scaling,
    sign,
    snr,
)
from tests.support import pages

PAGE = pages.ROOT / "docs" / "studies.md"
Rows = list[dict[str, Any]]


def kept() -> list[str]:
    """The results that were kept: a study, its preset, and what differs from text and a transformer."""
    return sorted(file.name.removesuffix(".jsonl.gz") for file in _found.FOLDER.glob("*.gz"))


def study_of(name: str) -> str:
    return name.split("-")[0]


def preset_of(name: str) -> Any:
    """The preset of the study, as it is today."""
    return STUDIES[study_of(name)].presets[name.split("-")[1]]  # pyright: ignore[reportArgumentType]


def tuned(rows: Rows) -> dict[str, Tuned]:
    """All methods of a study."""
    names = dict.fromkeys(row["method"] for row in rows if "method" in row)
    return findings.read(rows, dict.fromkeys(names, Train()))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def table(of: report.Table) -> str:
    return markdown(of.header, of.rows)


def verdicts(found: Iterable[decide.Verdict]) -> str:
    return markdown(["claim", "answer", "why"], [[v.claim, v.answer, v.why] for v in found])


def loss(own: Tuned) -> str:
    return str(decide.estimate(list(own.reported.values())))


def rate(own: Tuned) -> str:
    return f"{own.method.learning_rate:.3g}"


def rates_and_losses(every: dict[str, Tuned], said: dict[str, str]) -> str:
    rows = [[words, rate(every[name]), loss(every[name])] for name, words in said.items()]
    return markdown(["", "learning rate", "final loss"], rows)


def of_sign(name: str, rows: Rows) -> list[str]:
    every = tuned(rows)
    names = {
        sign.MICRO: "MicroSign, the sign of every example's gradient",
        sign.MEAN: "Sign, of the batch's mean",
        sign.LATE: "SignEMA, of the momentum",
    }
    claims = [pair for pair in sign.CLAIMS if pair not in preset_of(name).too_short]
    looks = [row for row in rows if "disagree" in row]
    return [
        rates_and_losses(every, names),
        verdicts(findings.compare(every, claims)),
        *(table(one) for one in (sign.disagreement(looks).tables if looks else ())),
    ]


def of_arms(name: str, rows: Rows) -> list[str]:
    every = tuned(rows)
    return [
        rates_and_losses(every, {one: one for one in every}),
        verdicts(arms.decided(every)),
    ]


def of_argument(name: str, rows: Rows) -> list[str]:
    looks = [_agreement.Look(**row) for row in rows]
    names = {
        _agreement.REAL: "gradients",
        _agreement.SURROGATE: "Gaussian surrogates",
        _agreement.FORMULA: "formulas",
    }
    shares = [
        [
            str(step) if kind == _agreement.REAL else "",
            names[kind],
            *(
                f"{np.mean([look.shares[kind][place] for look in looks if look.step == step]):.3f}"
                for place in _agreement.PLACES
            ),
        ]
        for step in sorted({look.step for look in looks})
        for kind in _agreement.KINDS
    ]
    (groups,) = argument.by_group(looks).tables
    return [
        markdown(["step", "", *_agreement.PLACES], shares),
        verdicts(argument.verdicts(looks)),
        table(groups),
    ]


def of_adam(name: str, rows: Rows) -> list[str]:
    every = tuned(rows)
    losses = [[one, *(loss(every[one + end]) for end in ("", adam.CLIPPED))] for one in adam.NAMES]
    section = adam.stability([row for row in rows if "stability" in row])
    return [
        markdown(["", "not clipped", "clipped"], losses),
        verdicts(findings.compare(every, adam.CLAIMS)),
        *map(table, section.tables),
        verdicts(section.verdicts),
    ]


def of_plane(name: str, rows: Rows) -> list[str]:
    every, preset = tuned(rows), preset_of(name)
    points = ["MicroAdamMSQ", "Adam", "MicroAdam", "MicroAdamVar"]
    losses = [
        [str(size), *(loss(every[plane.name_of(size, point)]) for point in points)]
        for size in preset.batch_sizes
    ]
    return [
        markdown(["batch", *points], losses),
        verdicts(findings.compare(every, plane.claims(preset))),
    ]


def of_rivals(name: str, rows: Rows) -> list[str]:
    every, preset = tuned(rows), preset_of(name)
    cells = [
        [*map(str, cell)]
        + [
            f(every[rivals.name_in(cell, n)])
            for n in (rivals.ADAM, rivals.FLOORED)
            for f in (rate, loss)
        ]
        for cell in preset.cells
        if rivals.name_in(cell, rivals.FLOORED) in every
    ]
    at_home = {
        one: every[rivals.name_in(preset.home, one)]
        for one in rivals.OPTIONS
        if rivals.name_in(preset.home, one) in every
    }
    alike = {one: every[one] for one in every if one.endswith(rivals.ALIKE)}
    header = ["batch", "steps", "width", "rate of Adam", "Adam", "rate of MSQ", "MSQ with a floor"]
    out = [
        markdown(header, cells),
        verdicts(rivals.where(preset, every)),
        rates_and_losses(at_home, {one: one for one in at_home}),
        verdicts(rivals.beside(at_home)),
    ]
    if alike:
        out += [rates_and_losses(alike, {one: one for one in alike}), verdicts(rivals.alike(alike))]
    return out


def of_scaling(name: str, rows: Rows) -> list[str]:
    losses: Any = {}
    for row in (row for row in rows if "rule" in row):
        by_size = losses.setdefault(row["rule"], {})
        ended = math.inf if row["test_loss"] is None else row["test_loss"]
        by_size.setdefault(row["batch_size"], {})[row["seed"]] = ended
    (measured,) = (row for row in rows if "noise_scale" in row)
    section = scaling.final(losses, measured["batch_size"], measured["noise_scale"])
    scales = [[half, f"{x:.0f}"] for half, x in measured["noise_scale"].items()]
    return [
        *map(table, section.tables),
        verdicts(section.verdicts),
        markdown(["part of the run", "noise scale"], scales),
    ]


def of_law(name: str, rows: Rows) -> list[str]:
    best: Any = {}
    for row in (row for row in rows if "optimizer" in row):
        by_size = best.setdefault(row["optimizer"], {}).setdefault(row["batch_size"], {})
        by_size.setdefault(row["seed"], {})[row["learning_rate"]] = row["tune_loss"]
    for by_size in best.values():
        for size, by_seed in by_size.items():
            by_size[size] = {seed: law.lowest(curve) for seed, curve in by_seed.items()}
    (noise_scale,) = (row["noise_scale"] for row in rows if "noise_scale" in row)
    section = law.section(best, noise_scale)
    return [*map(table, section.tables), verdicts(section.verdicts)]


def of_ramp(name: str, rows: Rows) -> list[str]:
    runs: Any = {}
    chosen = {}
    for row in (row for row in rows if row["seed"] < TUNING_SEED):
        runs.setdefault(row["plan"], {})[row["seed"]] = row
        chosen[row["plan"]] = row["learning_rate"]
    section = ramp.ended(preset_of(name), runs, chosen)
    return [*map(table, section.tables), verdicts(section.verdicts)]


def of_clipping(name: str, rows: Rows) -> list[str]:
    every = {one.split(" at ")[0]: own for one, own in tuned(rows).items() if own.runs}
    kinds = [clipping.NONE, clipping.BATCH, clipping.EXAMPLE]
    losses = [
        [one, *(loss(every[clipping.name_of(one, kind)]) for kind in kinds)]
        for one in clipping.OPTIMIZERS
    ]
    return [markdown(["", *kinds], losses), verdicts(clipping.decided(every))]


def of_quantile(name: str, rows: Rows) -> list[str]:
    every = {one: own for one, own in tuned(rows).items() if own.runs}
    (best,) = (row["best"] for row in rows if "best" in row)
    return [
        rates_and_losses(every, {one: one + best[one] for one in every}),
        verdicts(quantile.decided(every)),
    ]


def of_snr(name: str, rows: Rows) -> list[str]:
    found = snr.sections(*snr.read(rows), preset_of(name).base)
    return [
        text
        for section in found
        for text in [*map(table, section.tables), *[verdicts(section.verdicts)] * bool(section.verdicts)]
    ]


def of_overhead(name: str, rows: Rows) -> list[str]:
    points = _points.read(rows)
    models = dict.fromkeys(point.model for point in points)
    costs = [
        [
            point.model,
            f"{point.width}",
            f"{point.length}",
            f"{point.length / point.width:g}",
            *(f"{point.time(one).mean:.2f} ({point.memory(one):.2f})" for one in _points.NAMES),
        ]
        for model in models
        for point in points
        if point.model == model
    ]
    *found, compiled = overhead.sections(points)
    return [
        markdown(["model", "D", "T", "T / D", *_points.NAMES], costs),
        verdicts(verdict for section in found for verdict in section.verdicts),
        *map(table, compiled.tables),
    ]


TABLES: dict[str, Callable[[str, Rows], list[str]]] = {
    "sign": of_sign,
    "arms": of_arms,
    "argument": of_argument,
    "adam": of_adam,
    "plane": of_plane,
    "rivals": of_rivals,
    "scaling": of_scaling,
    "law": of_law,
    "ramp": of_ramp,
    "clipping": of_clipping,
    "quantile": of_quantile,
    "snr": of_snr,
    "overhead": of_overhead,
}


def keep(directory: Path) -> None:
    """Keeps the results of a study, without the time in the compressed file."""
    content = (directory / "results.jsonl").read_bytes()
    _, _, study, *options = json.loads(content.partition(b"\n")[0])["command"].split()
    _found.FOLDER.mkdir(exist_ok=True)
    name = "-".join([study, *options[1::2]])
    (_found.FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))


def filled(text: str) -> str:
    """The text of the page, with the tables of all studies whose results are kept."""
    for name in kept():
        for i, one in enumerate(TABLES[study_of(name)](name, _found.rows(name)[1:])):
            place = re.compile(rf"(<!-- found: {name} {i} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
            assert len(place.findall(text)) == 1, f"the page has no place for table {i} of {name}"
            text = place.sub(lambda found, one=one: f"{found[1]}{one}\n{found[3]}", text)
    return text


if __name__ == "__main__":
    for argument_ in sys.argv[1:]:
        keep(Path(argument_))
    PAGE.write_text(filled(PAGE.read_text()))
