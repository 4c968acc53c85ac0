"""What there is to do for a strategy, in the quantities that its price is made of.

With B examples, F_t operations for one example's terms, F_s for the steps after them, g bytes for one
example's gradient, f bytes of factors for all examples, and s accumulators to feed: the formulas stand
in the strategies, beside what they price.
"""

from __future__ import annotations

import dataclasses
import functools

from pergrad._compat import aval
from pergrad._cut import Tail, Units
from pergrad._ir import Backend, accumulation_dtype, counts


@dataclasses.dataclass(frozen=True)
class Work:
    """A tail is to be reduced over `size` units on a kind of device.

    `accumulators` is the number of accumulators that one pass over the gradients would feed.
    """

    units: Units
    size: int
    accumulators: int
    device: Backend

    @staticmethod
    def of(units: Units, examples: int, accumulators: int, device: Backend) -> Work:
        """The work for as many units as so many examples have."""
        return Work(units, max(1, int(units.per_example * examples)), accumulators, device)

    @property
    def tail(self) -> Tail:
        return self.units.tail

    @functools.cached_property
    def term_operations(self) -> float:
        """F_t: of one example's terms."""
        return counts.operations(term.eqn for term in self.tail.terms if term.eqn is not None)

    @functools.cached_property
    def step_operations(self) -> float:
        """F_s: of the steps, for one example or after a sum over all."""
        return counts.operations(self.tail.steps)

    @property
    def summing_operations(self) -> float:
        """B F_t + F_s: of the mean gradient, summed over examples and positions at once."""
        return self.size * self.term_operations + self.step_operations

    @property
    def forming_operations(self) -> float:
        """B (F_t + F_s): of the gradients of all examples, one by one."""
        return self.size * (self.term_operations + self.step_operations)

    @property
    def numbers(self) -> int:
        """How many numbers one example's gradients have."""
        return sum(counts.size(g) for g in self.tail.grads)

    @property
    def gradient(self) -> float:
        """g: bytes of one example's gradients, in the dtype that sums are kept in."""
        return sum(counts.size(g) * accumulation_dtype(aval(g).dtype).itemsize for g in self.tail.grads)

    @property
    def formed(self) -> float:
        """Bytes that forming one example's gradients takes."""
        return self.gradient + self.tail.bytes_to_form + self.units.bytes_of_making

    @property
    def factors(self) -> float:
        """f: bytes of all examples' factors."""
        return self.size * sum(counts.nbytes(v) for v in self.tail.factors)

    @property
    def factor_numbers(self) -> int:
        """How many numbers the factors of one example have."""
        return sum(counts.size(v) for v in self.tail.factors)

    @property
    def convolves(self) -> bool:
        """Whether a sum over all examples is a convolution."""
        return any(term.convolves for term in self.tail.terms)

    @property
    def looks_up(self) -> bool:
        """Whether the gradient is made of lookups alone."""
        return bool(self.tail.terms) and all(term.is_lookup for term in self.tail.terms)

    @property
    def positions(self) -> int:
        """T: how many contributions the first term adds up."""
        return self.tail.terms[0].contributions if self.tail.terms else 1

    def moving(self, moved: float, at_once: float | None = None) -> float:
        """Seconds to read and write so many bytes, of which so many are in use at once.

        What fits into the cache is read and written at the cache's rate.
        """
        fits = (moved if at_once is None else at_once) <= self.device.cache_size
        return moved / (self.device.cache_rate if fits else self.device.memory_rate)

    def seconds_of_joining(self) -> float:
        """Seconds to feed one more statistic where a pass for others runs anyway."""
        if self.looks_up:
            return self.moving(self.factors)
        return self.moving(self.size * self.gradient, at_once=self.gradient * (1 + self.accumulators))
