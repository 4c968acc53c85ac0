"""The outcome of stage 3: how many examples run at once, how each tail is reduced, where to start."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from pergrad._compat import Var
from pergrad._cut import Cut
from pergrad._ir import backend
from pergrad._plan.choose import Asked, TailPlan, choose
from pergrad._plan.cotangent import start_from_weight
from pergrad._plan.microbatch import choose_microbatch_size
from pergrad._statistics import LeafStatistic


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What runs: how many examples at once, and how each tail is reduced.

    `microbatch_size` examples run at once, which are whole groups of `group_size`. `paths` are the names
    of the parameters. `tails` has the plan of each tail at the number of the tail. `weighed` are the
    variables that carry the weight of an example as a factor if the backward pass starts from the
    weight, which it does only if all examples have the same one. If there are none, it starts from 1.
    `drops` says whether examples that are not finite are dropped.
    """

    batch_size: int
    microbatch_size: int
    group_size: int
    paths: tuple[str, ...] = dataclasses.field(repr=False)
    tails: tuple[TailPlan, ...] = dataclasses.field(repr=False)
    weighed: frozenset[Var] = dataclasses.field(repr=False)
    drops: bool

    @property
    def microbatches(self) -> int:
        """How many microbatches the batch is divided into."""
        return math.ceil(self.batch_size / self.microbatch_size)


def make_schedule(
    cut: Cut,
    paths: Sequence[str],
    wanted: Sequence[Sequence[LeafStatistic]],
    batch_size: int,
    microbatch_size: int | str | None,
    asked: Asked,
    *,
    room: float,
) -> Schedule:
    """The schedule for `batch_size` examples. `wanted` has the statistics of every parameter.

    With `microbatch_size="auto"`, activations and tails of a microbatch take at most `room` bytes.
    """
    device = backend.backend()

    @functools.cache
    def planned(size: int) -> tuple[TailPlan, ...]:
        return tuple(choose(tail, wanted, size, device, asked) for tail in cut.all_tails())

    if microbatch_size == "auto":
        microbatch_size = choose_microbatch_size(
            cut, wanted, batch_size, device, planned, asked.drops, room
        )
    assert not isinstance(microbatch_size, str)
    group_size = math.lcm(*(s.unit for own in wanted for s in own if isinstance(s.unit, int)))
    at_once = min(batch_size, microbatch_size or batch_size)
    at_once = group_size * math.ceil(at_once / group_size)
    tails, weighed = start_from_weight(cut.program, planned(at_once))
    return Schedule(batch_size, at_once, group_size, tuple(paths), tails, weighed, asked.drops)
