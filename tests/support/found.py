"""The tables of docs/studies.md, made from the results that were kept of the studies.

    python -m tests.support.found studies/sign-quick studies/adam-quick

keeps the results of these directories, which `pergrad study` has written, and then writes the tables of
all studies whose results are kept into the page. A table stands between the line `<!-- found: sign 0
-->`, with the study's name and the number of the table, and the line `<!-- end -->`. The rule of each
study is the study's own: these functions only read its results and write Markdown.
"""

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pergrad.lab.compare import decide
from pergrad.lab.compare.sweep import Tuned
from pergrad.lab.config import Train
from pergrad.lab.pages import findings
from pergrad.lab.studies import _found, adam, clipping, plane, rivals, sign
from tests.support import pages

PAGE = pages.ROOT / "docs" / "studies.md"


def kept() -> list[str]:
    """The studies whose results were kept."""
    return sorted(file.name.removesuffix("-quick.jsonl.gz") for file in _found.FOLDER.glob("*.gz"))


def tuned(name: str) -> dict[str, Tuned]:
    """All methods of a study."""
    rows = _found.rows(name)
    names = dict.fromkeys(row["method"] for row in rows if "method" in row)
    return findings.read(rows, dict.fromkeys(names, Train()))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def verdicts(found: Iterable[decide.Verdict]) -> str:
    return markdown(["claim", "answer", "why"], [[v.claim, v.answer, v.why] for v in found])


def loss(own: Tuned) -> str:
    return str(decide.estimate(list(own.reported.values())))


def rate(own: Tuned) -> str:
    return f"{own.method.learning_rate:.3g}"


def of_sign() -> list[str]:
    every = tuned("sign")
    names = {
        sign.MICRO: "MicroSign, the sign of every example's gradient",
        sign.MEAN: "Sign, of the batch's mean",
        sign.LATE: "SignEMA, of the momentum",
    }
    rows = [[said, rate(every[name]), loss(every[name])] for name, said in names.items()]
    return [
        markdown(["", "learning rate", "final loss"], rows),
        verdicts(findings.compare(every, sign.CLAIMS)),
    ]


def of_adam() -> list[str]:
    every = tuned("adam")
    rows = [[name, *(loss(every[name + end]) for end in ("", adam.CLIPPED))] for name in adam.NAMES]
    section = adam.stability([row for row in _found.rows("adam") if "stability" in row])
    (table,) = section.tables
    return [
        markdown(["", "not clipped", "clipped"], rows),
        verdicts(findings.compare(every, adam.CLAIMS)),
        markdown(table.header, table.rows),
        verdicts(section.verdicts),
    ]


def of_plane() -> list[str]:
    every = tuned("plane")
    preset = plane.PRESETS["quick"]
    points = ["MicroAdamMSQ", "Adam", "MicroAdam", "MicroAdamVar"]
    rows = [
        [str(size), *(loss(every[plane.name_of(size, point)]) for point in points)]
        for size in preset.batch_sizes
    ]
    return [
        markdown(["batch", *points], rows),
        verdicts(findings.compare(every, plane.claims(preset))),
    ]


def of_rivals() -> list[str]:
    every = tuned("rivals")
    preset = rivals.PRESETS["quick"]
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
        name: every[rivals.name_in(preset.home, name)]
        for name in rivals.OPTIONS
        if rivals.name_in(preset.home, name) in every
    }
    return [
        markdown(["batch", "steps", "rate of Adam", "Adam", "rate of MSQ", "MSQ with a floor"], cells),
        verdicts(rivals.where(preset, every)),
        markdown(
            ["", "learning rate", "final loss"],
            [[name, rate(own), loss(own)] for name, own in at_home.items()],
        ),
        verdicts(rivals.beside(at_home)),
    ]


def of_clipping() -> list[str]:
    every = {name.split(" at ")[0]: own for name, own in tuned("clipping").items() if own.runs}
    kinds = [clipping.NONE, clipping.BATCH, clipping.EXAMPLE]
    rows = [
        [name, *(loss(every[clipping.name_of(name, kind)]) for kind in kinds)]
        for name in clipping.OPTIMIZERS
    ]
    return [markdown(["", *kinds], rows), verdicts(clipping.decided(every))]


TABLES: dict[str, Callable[[], list[str]]] = {
    "sign": of_sign,
    "adam": of_adam,
    "plane": of_plane,
    "rivals": of_rivals,
    "clipping": of_clipping,
}


def keep(directory: Path) -> None:
    """Keeps the results of a study, without the time in the compressed file."""
    content = (directory / "results.jsonl").read_bytes()
    _, _, name, _, preset = json.loads(content.partition(b"\n")[0])["command"].split()
    _found.FOLDER.mkdir(exist_ok=True)
    (_found.FOLDER / f"{name}-{preset}.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))


def filled(text: str) -> str:
    """The text of the page, with the tables of all studies whose results are kept."""
    for name in kept():
        for i, table in enumerate(TABLES[name]()):
            place = re.compile(rf"(<!-- found: {name} {i} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
            assert len(place.findall(text)) == 1, f"the page has no place for table {i} of {name}"
            text = place.sub(lambda found, table=table: f"{found[1]}{table}\n{found[3]}", text)
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        keep(Path(argument))
    PAGE.write_text(filled(PAGE.read_text()))
