"""The names by which optimizers and diagnostics ask for statistics, and the error if one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from pergrad._errors import ArgumentError
from pergrad._statistics import Count, Mean, Per, Statistic, Variance

Stats = Mapping[str, Any]


class Entry(NamedTuple):
    """A statistic as an optimizer asks for it.

    `source` is the text that makes it. Gradients c g have c ** `degree` times the statistic.
    """

    statistic: Statistic
    source: str
    degree: int


# Every name by which an optimizer asks for a statistic.
VOCABULARY = {
    "mean": Entry(Mean(), "pg.Mean()", 1),
    "second_moment": Entry(Mean(jnp.square), "pg.Mean(jnp.square)", 2),
    "variance": Entry(Variance(), "pg.Variance()", 2),
    "sign": Entry(Mean(jnp.sign), "pg.Mean(jnp.sign)", 0),
    "count": Entry(Count(), "pg.Count()", 0),
}


def asked(*names: str) -> dict[str, Statistic]:
    """The dictionary of these statistics."""
    return {name: VOCABULARY[name].statistic for name in names}


def missing(who: str, name: str, stats: Stats | None, source: str, then: str) -> ArgumentError:
    """Says what is missing, the line that asks for it, and what comes `then`."""
    there = "there is no stats=" if stats is None else f"stats has only {', '.join(map(repr, stats))}"
    return ArgumentError(
        f"{who} needs the statistic {name!r}, but {there}. Ask for it,\n"
        f'    stats_fn = pg.value_and_stats(loss, {{..., "{name}": {source}}})\n'
        f"{then}"
    )


def source(name: str, per: Per = "example") -> str:
    """The text that makes a statistic, of units other than examples too."""
    text = VOCABULARY[name].source
    return text if per == "example" else f"{text[:-1]}, per={per!r})"
