"""The plan that `explain` shows: what the schedule costs, and the reasons for its choices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pergrad._compat import aval
from pergrad._cut import Cut, units_of
from pergrad._ir import Backend, backend, counts
from pergrad._plan import table
from pergrad._plan.backbone import operations_of
from pergrad._plan.choose import TailPlan
from pergrad._plan.microbatch import activations, bytes_at_once
from pergrad._plan.schedule import Schedule
from pergrad._plan.table import Row, ratio, short
from pergrad._strategies import Work

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Plan(Schedule):
    """What a call would run, with one row for each parameter. Print it, or show it in a notebook.

    In a terminal it is printed in colours if the package rich is installed. `text` is the same table
    as plain text, for a file.

    `rows` has for every parameter its `path`, `shape`, `kind` of sum, `strategy`, `operations`,
    `plain_operations`, `bytes` and the `reason` for the strategy. `operations` are floating-point
    operations and `bytes` is temporary memory, both estimated for the whole batch. `plain_operations`
    and `plain_bytes` are the same numbers for `jax.grad`. Microbatches are made of whole groups of
    `group_size` examples. If several `devices` share the batch, all numbers are those of one device,
    which has `batch_size` examples.
    """

    rows: tuple[Row, ...]
    backend: str
    operations: float
    plain_operations: float
    bytes: float
    plain_bytes: float
    devices: int

    @property
    def text(self) -> str:
        """The table as plain text, which has at most 80 columns unless a single name is longer."""
        return table.as_text(self.rows, self._totals())

    def __str__(self) -> str:
        return table.in_terminal(self) or self.text

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Any]:
        """What rich shows of a plan."""
        return table.as_rich(self.rows, self._totals(), console)

    def _repr_html_(self) -> str:
        return table.as_html(self.rows, self._totals())

    def _totals(self) -> list[str]:
        """The lines below the table."""
        is_whole = self.microbatch_size == self.batch_size
        at_a_time = "all at once" if is_whole else f"{self.microbatch_size} at a time"
        each = f" on each of {self.devices} devices" if self.devices > 1 else ""
        operations = ratio(self.operations, self.plain_operations)
        dropped = ", those that are not finite dropped" if self.drops else ""
        return [
            f"{self.batch_size} examples{each}, {at_a_time}{dropped}, planned for {self.backend}",
            f"operations: {short(self.operations)}, {operations} x jax.grad",
            f"temporary memory: {short(self.bytes)}B, {ratio(self.bytes, self.plain_bytes)} x jax.grad "
            "(both estimated)",
        ]


def describe(schedule: Schedule, cut: Cut, devices: int) -> Plan:
    """The schedule, together with its costs and the reasons for its choices."""
    device, paths = backend.backend(), schedule.paths
    batch_size, at_once, tails = schedule.batch_size, schedule.microbatch_size, schedule.tails
    rounds = schedule.microbatches
    varying, fixed = operations_of(cut, batch_size)
    shapes = [tuple(aval(grad).shape) for grad in cut.program.grads]
    rows = {row.path: row for t in tails for row in _rows(t, paths, shapes, batch_size, at_once, device)}
    return Plan(
        batch_size=batch_size,
        microbatch_size=at_once,
        group_size=schedule.group_size,
        paths=paths,
        tails=tails,
        weighed=schedule.weighed,
        drops=schedule.drops,
        rows=tuple(rows[path] for path in paths),
        backend=device.name,
        operations=varying + rounds * fixed + sum(row.operations for row in rows.values()),
        plain_operations=varying + fixed + sum(row.plain_operations for row in rows.values()),
        # Factors that have to be kept are kept until the end.
        bytes=bytes_at_once(cut, tails, at_once, device)
        + sum(_kept_bytes(t, batch_size) for t in tails if rounds > 1),
        plain_bytes=activations(cut, batch_size, device),
        devices=devices,
    )


def bytes_of_two(schedule: Schedule, cut: Cut) -> float:
    """The temporary memory of two blocks of examples, whose gradients meet in inner products.

    The schedule is that of one block. While the second block runs, the factors of the first are kept.
    """
    plan = describe(schedule, cut, 1)
    return plan.bytes + 2 * sum(_kept_bytes(t, schedule.batch_size) for t in schedule.tails)


def _kept_bytes(tail_plan: TailPlan, batch_size: int) -> float:
    factors = tail_plan.tail.factors if tail_plan.keeps_factors else ()
    return batch_size * sum(counts.nbytes(v) for v in factors)


def _rows(
    tail_plan: TailPlan,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    batch_size: int,
    at_once: int,
    device: Backend,
) -> list[Row]:
    """One row for each parameter of the tail. They share the tail's operations in equal parts."""
    tail, choices = tail_plan.tail, tail_plan.choices
    times = math.prod(tail.lengths)
    share = times / len(tail.params)
    operations = sum(c.strategy.operations(c.work, c.statistics) for c in choices)
    made = dict.fromkeys(c.units for c in choices)
    operations += at_once * sum(units.operations_of_making for units in made)
    kind = " + ".join(term.kind for term in tail.terms) or "constant"
    return [
        Row(
            path=paths[param],
            shape=shapes[param],
            kind=f"{times} x {kind}" if tail.levels else kind,
            strategy=", ".join(map(str, (c.strategy for c in choices))) or "-",
            operations=share * operations * batch_size / at_once,
            plain_operations=share * _whole_work(tail_plan, batch_size, device).summing_operations,
            bytes=tail_plan.temporary_bytes,
            reason="; ".join(dict.fromkeys(c.reason for c in choices)),
        )
        for param in tail.params
    ]


def _whole_work(tail_plan: TailPlan, batch_size: int, device: Backend) -> Work:
    """The work of `jax.grad` for the tail."""
    (units,) = units_of(tail_plan.tail, "example")
    return Work.of(units, batch_size, 1, device)
