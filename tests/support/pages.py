"""The pages of the docs: their blocks of code, and JAX as a user finds it."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import jax

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


DRAWN = re.compile(r'savefig\("([^"/]+)"')
EVERY = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def figures(page: Path) -> list[str]:
    """The names of the figures that the code of a page draws."""
    return DRAWN.findall(page.read_text())


def blocks(page: Path) -> Iterator[tuple[CodeType, str | None]]:
    """Each block of Python, and the block of text right below it, if any: what it prints."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        lines_above = text[: block.start(1)].count("\n")
        yield compile("\n" * lines_above + block[1], str(page), "exec"), block[2]


@contextlib.contextmanager
def jax_as_for_users() -> Iterator[None]:
    jax.config.update("jax_enable_x64", False)
    with jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_enable_x64", True)
