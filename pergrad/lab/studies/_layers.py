"""Names for the parameters of the lab's models, and the groups in which studies sum them up."""

from __future__ import annotations

import re
from collections.abc import Iterable

GROUPS = {
    "embedding": ("embed", "position"),
    "attention": ("qkv", "out"),
    "feed-forward": ("up", "down"),
    "recurrent": ("input", "recurrent"),
    "convolutions": ("above", "row", "link"),
    "norms": ("norm", "attention_norm", "mlp_norm"),
    "head": ("head",),
}
_GROUP_OF = {word: name for name, words in GROUPS.items() for word in words}


def short(path: str) -> str:
    """A short name for a parameter, whose path is written in either of two ways.

    >>> short("['block_0']['qkv']['kernel'].value"), short("/norm/scale/value")
    ('block_0.qkv', 'norm.scale')
    """
    words = _words(path)
    return ".".join(words[:-1] if words[-1] in ("kernel", "embedding") else words)


def group(path: str) -> str:
    """Which of `GROUPS` a parameter is in."""
    return next(_GROUP_OF[word] for word in _words(path) if word in _GROUP_OF)


def groups(paths: Iterable[str]) -> list[str]:
    """Those of `GROUPS` that these parameters are in, in their order."""
    found = {group(path) for path in paths}
    return [name for name in GROUPS if name in found]


def _words(path: str) -> list[str]:
    return [word for word in re.findall(r"\w+", path) if word != "value"]
