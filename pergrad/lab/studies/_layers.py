"""Names for the parameters of the lab's model, and the groups in which studies sum them up."""

from __future__ import annotations

import re

GROUPS = ("embedding", "attention", "feed-forward", "norms", "head")
_OF = {"embed": 0, "position": 0, "qkv": 1, "out": 1, "up": 2, "down": 2, "head": 4}


def short(path: str) -> str:
    """A short name for a parameter, whose path is written in either of two ways.

    >>> short("['block_0']['qkv']['kernel'].value"), short("/norm/scale/value")
    ('block_0.qkv', 'norm.scale')
    """
    words = _words(path)
    return ".".join(words[:-1] if words[-1] in ("kernel", "embedding") else words)


def group(path: str) -> str:
    """Which of `GROUPS` a parameter is in."""
    found = [_OF[word] for word in _words(path) if word in _OF]
    return GROUPS[found[0]] if found else "norms"


def _words(path: str) -> list[str]:
    return [word for word in re.findall(r"\w+", path) if word != "value"]
