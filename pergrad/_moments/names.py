"""The names under which optimizers and diagnostics ask for statistics, and the error without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from pergrad._errors import ArgumentError
from pergrad._statistics import Count, Mean, Statistic, Variance

Stats = Mapping[str, Any]


class Entry(NamedTuple):
    """What a name stands for.

    If all gradients are multiplied by c, the result of the statistic is multiplied by c ** `degree`.
    """

    statistic: Statistic
    degree: int


VOCABULARY = {
    "mean": Entry(Mean(), 1),
    "second_moment": Entry(Mean(jnp.square), 2),
    "variance": Entry(Variance(), 2),
    "sign": Entry(Mean(jnp.sign), 0),
    "count": Entry(Count(), 0),
}


def asked(*names: str) -> dict[str, Statistic]:
    """The dictionary of these statistics, as `pg.value_and_stats` takes it."""
    return {name: VOCABULARY[name].statistic for name in names}


def missing(who: str, name: str, stats: Stats | None, source: str, then: str) -> ArgumentError:
    """The error if `stats` has no statistic `name`.

    Its message has the line that asks for the statistic, in which `source` is the text that makes it,
    and ends with what the user has to do `then`.
    """
    there = "there is no stats=" if stats is None else f"stats has only {', '.join(map(repr, stats))}"
    return ArgumentError(
        f"{who} needs the statistic {name!r}, but {there}. Ask for it,\n"
        f'    stats_fn = pg.value_and_stats(loss, {{..., "{name}": {source}}})\n'
        f"{then}"
    )


def written(statistic: Statistic) -> str:
    """The text that makes a statistic, as users write it."""
    return "pg." + re.sub(r"\b(square|sign)\b", r"jnp.\1", repr(statistic))
