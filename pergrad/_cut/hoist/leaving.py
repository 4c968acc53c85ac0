"""Which tails leave a loop or a branch: those whose factors are smaller than their gradients."""

from __future__ import annotations

from pergrad._cut.tail import Tail
from pergrad._ir import size


def can_leave(tail: Tail, split: bool) -> bool:
    """Whether a tail may leave the loop or the branch that it stands in.

    With `split`, the single contributions to sums are asked for, and every tail with terms leaves.
    """
    return bool(tail.terms) and (split or _is_smaller(tail))


def _is_smaller(tail: Tail) -> bool:
    """Whether the factors of a tail are smaller than its gradients."""
    return sum(map(size, tail.factors)) < sum(map(size, tail.grads))
