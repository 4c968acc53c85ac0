"""Refuses statistics of positions whose parameters do not have the same positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pergrad._cut import Cut, Tail, positions_of
from pergrad._errors import ArgumentError
from pergrad._statistics import Statistic


def check_positions(stats: Any, cut: Cut, paths: Sequence[str]) -> None:
    """Raises an error if a statistic adds up parts of parameters with different numbers of positions.

    A gradient that is the same for all examples belongs to every position, so it has any number.
    """
    places = {param: (t, place) for t in cut.all_tails() for place, param in enumerate(t.params)}
    for statistic in jax.tree.leaves(stats):
        if statistic.unit != "position":
            continue
        found: dict[str, tuple[str, int]] = {}
        for param, path in enumerate(paths):
            tail, place = places[param]
            if not statistic.selects(path) or not tail.terms:
                continue
            _check_parameter(statistic, path, tail, place)
            own, group = positions_of(tail, place), statistic.together(path)
            other, positions = found.setdefault(group, (path, own))
            if own != positions:
                raise ArgumentError(
                    f"{statistic!r}: the gradient of {other} is a sum over {_named(positions)}, and "
                    f"that of {path} is one over {_named(own)}. Only parameters with the same positions "
                    "have parts that can be added up. Select some of them with `where`"
                    f"{_by_leaf(statistic)}."
                )


def _check_parameter(statistic: Statistic, path: str, tail: Tail, place: int) -> None:
    """Raises an error if the sums of one parameter are not over the same positions, or not in order."""
    terms = tail.terms_of(place)
    reason = next((term.why_no_positions for term in terms if term.why_no_positions), None)
    numbers = sorted({term.contributions for term in terms})
    if reason is None and len(numbers) > 1:
        each = " and another over ".join(_named(n) for n in numbers[:2])
        reason = f"one of its sums is over {each}"
    if reason is not None:
        raise ArgumentError(
            f"{statistic!r}: the gradient of {path} has no parts that belong to positions: {reason}. "
            f"Leave it out: where=lambda path: path != {path!r}."
        )


def _named(positions: int) -> str:
    return f"{positions} position{'' if positions == 1 else 's'}"


def _by_leaf(statistic: Statistic) -> str:
    return ", or use by='leaf'" if hasattr(statistic, "by") else ""
