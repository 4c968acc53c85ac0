"""Examples in docstrings as blocks of code, for the API reference of the site.

Docstrings hold their examples as doctest has them: lines that begin with `>>>`, up to a blank line.
Markdown would read these as quotations.
"""

from typing import Any

import griffe


class FenceExamples(griffe.Extension):
    """Called by griffe, which reads the docstrings."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


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
