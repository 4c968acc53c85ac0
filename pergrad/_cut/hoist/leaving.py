"""Which tails leave a loop or a branch: those that are made of less than they make."""

from __future__ import annotations

from pergrad._cut.tail import Tail
from pergrad._ir import size


def can_leave(tail: Tail, split: bool) -> bool:
    return bool(tail.terms) and (split or _is_smaller(tail))


def _is_smaller(tail: Tail) -> bool:
    """Whether what a tail is made of is smaller than what it makes."""
    return sum(map(size, tail.factors)) < sum(map(size, tail.grads))
