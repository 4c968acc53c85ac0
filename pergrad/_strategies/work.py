"""The amounts of work that the price of a strategy is made of.

There are B examples. One example's terms take F_t operations, and the steps after them F_s. One
example's gradient takes g bytes, and the factors of all examples take f bytes. There are s accumulators
to feed. Each strategy has its own price formula in these symbols.
"""

from __future__ import annotations

import dataclasses
import functools

from pergrad._compat import aval
from pergrad._cut import Tail, Units
from pergrad._ir import Backend, accumulation_dtype, counts
from pergrad._statistics import LeafStatistic


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of reducing the tail of `units` over `size` of these units on a kind of device.

    `accumulators` is the number of accumulators that one pass over the gradients would feed, and
    `directions` the number of directions that inner products are taken with.
    """

    units: Units
    size: int
    accumulators: int
    device: Backend
    directions: int = 1

    @staticmethod
    def of(units: Units, examples: int, accumulators: int, device: Backend, directions: int = 1) -> Work:
        """The work for all units of `examples` examples."""
        size = max(1, int(units.per_example * examples))
        return Work(units, size, accumulators, device, directions)

    @property
    def tail(self) -> Tail:
        """The tail that is reduced."""
        return self.units.tail

    @functools.cached_property
    def term_operations(self) -> float:
        """F_t: the operations of one example's terms."""
        return counts.operations(term.eqn for term in self.tail.terms if term.eqn is not None)

    @functools.cached_property
    def step_operations(self) -> float:
        """F_s: the operations of the steps, for one example or once after a sum over all examples."""
        return counts.operations(self.tail.steps)

    @property
    def summing_operations(self) -> float:
        """B F_t + F_s: the operations of the mean gradient, as one sum over examples and positions."""
        return self.size * self.term_operations + self.step_operations

    @property
    def forming_operations(self) -> float:
        """B (F_t + F_s): the operations of forming the gradients of all examples."""
        return self.size * (self.term_operations + self.step_operations)

    def operations_on_formed(self, statistic: LeafStatistic) -> float:
        """The operations of the products that a statistic makes with the gradients of all examples."""
        shapes = [aval(g) for g in self.tail.grads]
        return self.size * sum(statistic.operations(g, self.size, self.directions) for g in shapes)

    @property
    def numbers(self) -> int:
        """How many numbers one example's gradients consist of."""
        return sum(counts.size(g) for g in self.tail.grads)

    @property
    def gradient(self) -> float:
        """g: the bytes of one example's gradients, in the dtype that sums are kept in."""
        return sum(counts.size(g) * accumulation_dtype(aval(g).dtype).itemsize for g in self.tail.grads)

    @property
    def formed(self) -> float:
        """The bytes of memory needed to form one example's gradients."""
        return self.gradient + self.tail.bytes_to_form + self.units.bytes_of_making

    @property
    def factors(self) -> float:
        """f: the bytes of all examples' factors."""
        return self.size * sum(counts.nbytes(v) for v in self.tail.factors)

    @property
    def factor_numbers(self) -> int:
        """How many numbers the factors of one example consist of."""
        return sum(counts.size(v) for v in self.tail.factors)

    @property
    def convolves(self) -> bool:
        """Whether the sum of a term over all examples is a convolution."""
        return any(term.convolves for term in self.tail.terms)

    @property
    def positions(self) -> int:
        """T: the number of contributions that the first term adds up."""
        return self.tail.terms[0].contributions if self.tail.terms else 1

    def moving(self, moved: float, at_once: float | None = None) -> float:
        """The seconds it takes to read and write `moved` bytes.

        `at_once` of these bytes, by default all of them, are in use at the same time. If they fit into
        the cache, they are read and written at the cache's rate.
        """
        fits = (moved if at_once is None else at_once) <= self.device.cache_size
        return moved / (self.device.cache_rate if fits else self.device.memory_rate)

    def seconds_of_joining(self, statistic: LeafStatistic) -> float:
        """The seconds it takes to feed one more statistic in a pass that runs for others anyway."""
        if self.tail.looks_up:
            return self.moving(self.factors)
        passed = self.moving(self.size * self.gradient, at_once=self.gradient * (1 + self.accumulators))
        return passed + self.operations_on_formed(statistic) / self.device.product_rate
