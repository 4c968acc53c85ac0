"""What griffe, which reads the docstrings for the API reference of the site, has to be told.

Docstrings hold their examples as doctest has them: lines that begin with `>>>`, up to a blank line.
Markdown would read these as quotations, so they become blocks of code. Where a folder offers a function
by the name of the file that defines it, such as `check`, griffe takes the file for the function. And it
does not read an entry about several arguments whose names take more than one line.
"""

import re
from typing import Any

import griffe

NAMES = re.compile(r"^( *)((?:\w+,\s+)+\w+):", re.MULTILINE)


class FenceExamples(griffe.Extension):
    """Called by griffe."""

    def on_package(self, *, pkg: Any, **kwargs: Any) -> None:
        for alias in [member for member in pkg.members.values() if member.is_alias]:
            parts = alias.target_path.split(".")
            if parts[0] == pkg.name and parts[-1] == alias.name:
                found = pkg[parts[1:]]
                if found.is_module and alias.name in found.members:
                    function = found.members[alias.name]
                    pkg.members[alias.name] = griffe.Alias(alias.name, function, parent=pkg)

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(NAMES.sub(_in_one_line, obj.docstring.value))


def _in_one_line(names: re.Match[str]) -> str:
    return names[1] + " ".join(names[2].split()) + ":"


def fenced(text: str) -> str:
    """The text, with a fence around every example.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    out: list[str] = []
    indent: str | None = None  # of the example that the line belongs to
    for line in [*text.splitlines(), ""]:
        if indent is None and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            out.append(f"{indent}```pycon")
        if indent is not None and not line.strip():
            out.append(f"{indent}```")
            indent = None
        out.append(line)
    return "\n".join(out[:-1])
