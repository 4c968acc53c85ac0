"""The numbers of the chips that programs are compiled for, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One chip, with one core that programs run on.

    Three numbers are in the vendor's tables (cloud.google.com/tpu/docs, the pages v5e, v5p and v6e):
    `peak`, the operations a second of products in bfloat16; `bandwidth`, the bytes a second of its
    memory; `memory`, the bytes of that.

    `clock`, the cycles a second, follows from them: a chip has `units` matrix units of `side` x `side`
    multipliers, each of which multiplies and adds once a cycle, so
    peak = units x side^2 x 2 x clock.

    `share` is what large elementwise loops get of the bandwidth by the compiler's own estimate: the
    bytes of `2 * x + 1`, read and written, divided by its estimated time and by `bandwidth`.
    """

    kind: str
    topology: str  # the smallest group of chips that the compiler has a description of
    units: int
    side: int
    peak: float
    bandwidth: float
    memory: float
    share: float

    @property
    def clock(self) -> float:
        return self.peak / (self.units * self.side**2 * 2)


CHIPS: dict[str, Chip] = {
    "v5e": Chip("TPU v5 lite", "v5e:2x2", 4, 128, 197e12, 819e9, 16e9, share=0.81),
    "v5p": Chip("TPU v5", "v5p:2x2x1", 8, 128, 459e12, 2765e9, 95e9, share=0.72),
    "v6e": Chip("TPU v6 lite", "v6e:2x2", 4, 256, 918e12, 1640e9, 32e9, share=0.81),
}
