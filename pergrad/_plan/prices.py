"""What reducing a tail costs in seconds on a kind of device, by strategy.

From three counts: operations of products, bytes read and written, steps of loops. With F_t operations
for one example's terms, F_s for the steps after them, g bytes for one example's gradient, f bytes of
factors for all B examples, and s statistics,

    summed        (B F_t + F_s) / product rate   + (f + g) / memory rate
    factored      (B F_t + F_s) / product rate   + (2 f + g) / memory rate      for each statistic
    centred       (B F_t + F_s) / product rate   + B g / memory rate            for each statistic
    streamed      B (F_t + F_s) / product rate   + B g (1 + 2 s) / memory rate  + B loop steps
    materialise   B (F_t + F_s) / batched rate   + B g (1 + s) / memory rate
    sparse        (2 + s) (f + g) / memory rate
    gram          B F_g / product rate           + 2 f / memory rate            + B loop steps
                  or B F_g / batched rate        + 2 f / memory rate

with F_g = 2 T^2 (a + b) for a product of T positions, and B times that for the inner products of all.
A convolution is summed by a convolution over all examples, at the convolution rate.
What fits into the cache is read and written at the cache's rate. The rates are rough on purpose: what
they decide differs by factors, not by percents.
"""

from __future__ import annotations

import dataclasses

from pergrad._compat import aval
from pergrad._cut import Convolution, Lookup, Tail
from pergrad._ir import Backend, accumulation_dtype, counts
from pergrad._statistics import LeafStatistic, Pairs
from pergrad._strategies import Gram, Strategy, Streamed


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices of reducing `tail` over `size` examples to `statistics` statistics."""

    tail: Tail
    size: int
    statistics: int
    device: Backend

    @property
    def term_operations(self) -> float:
        """F_t: of one example's terms."""
        return counts.operations(term.eqn for term in self.tail.terms if term.eqn is not None)

    @property
    def step_operations(self) -> float:
        """F_s: of the steps, for one example or after a sum over all."""
        return counts.operations(self.tail.steps)

    @property
    def forming_operations(self) -> float:
        """Of the gradients of all examples, one by one."""
        return self.size * (self.term_operations + self.step_operations)

    @property
    def gradient(self) -> float:
        """g: bytes of one example's gradients, kept wide."""
        return sum(counts.size(g) * accumulation_dtype(aval(g).dtype).itemsize for g in self.tail.grads)

    @property
    def formed(self) -> float:
        """Bytes of what is formed for one example: the gradients, terms that are mixed into them, and
        what these take."""
        mixes = self.tail.steps_that("mix")
        terms = sum(counts.nbytes(term.out) for term in self.tail.terms if term.eqn is not None)
        return self.gradient + sum(t.scratch for t in self.tail.terms) + (terms if mixes else 0)

    @property
    def factors(self) -> float:
        """f: bytes of all examples' factors."""
        return self.size * sum(counts.nbytes(v) for v in self.tail.factors)

    @property
    def convolves(self) -> bool:
        """Whether a sum over all examples is a convolution."""
        return any(isinstance(term, Convolution) for term in self.tail.terms)

    def seconds(self, strategy: Strategy, statistic: LeafStatistic | None = None) -> float:
        """The price of one strategy, for all statistics if it forms gradients, else for one.

        That one is `statistic`, where it matters which.
        """
        d, b, f, g, s = self.device, self.size, self.factors, self.gradient, self.statistics
        at_once = b * self.term_operations + self.step_operations
        one_by_one = self.forming_operations
        match strategy.name:
            case "summed":
                rate = d.convolution_rate if self.convolves else d.product_rate
                return at_once / rate + self._memory(f + g)
            case "factored":
                return at_once / d.product_rate + self._memory(2 * f + g)
            case "centred":
                return at_once / d.product_rate + self._memory(b * g, at_once=3 * g)
            case "streamed":
                passes = self._memory(b * g * (1 + 2 * s), at_once=g * (1 + s))
                return one_by_one / d.product_rate + passes + b * d.loop_step
            case "materialise":
                return one_by_one / d.batched_rate + self._memory(b * g * (1 + s))
            case "sparse":
                return self._memory((2 + s) * (f + g))
            case "gram":
                products = b * self.gram_operations * (b if isinstance(statistic, Pairs) else 1)
                batched = isinstance(strategy, Gram) and strategy.batched
                rate, steps = (d.batched_rate, 0) if batched else (d.product_rate, b * d.loop_step)
                return products / rate + self._memory(2 * f) + steps
        raise AssertionError(strategy.name)

    def seconds_of_joining(self) -> float:
        """The price of feeding one more statistic where a pass for others runs anyway."""
        g = self.gradient
        if self.tail.terms and all(isinstance(term, Lookup) for term in self.tail.terms):
            return self._memory(self.factors)
        return self._memory(self.size * g, at_once=g * (1 + self.statistics))

    @property
    def _positions(self) -> int:
        return self.tail.terms[0].contributions if self.tail.terms else 1

    @property
    def gram_operations(self) -> float:
        """F_g: of the norm of one example's gradient, from its factors."""
        return 2 * self._positions * sum(counts.size(v) for v in self.tail.factors)

    @property
    def plain_operations(self) -> float:
        """Floating-point operations of the mean gradient."""
        return self.size * self.term_operations + self.step_operations

    def operations_of(self, strategy: Strategy, statistics: int) -> float:
        """Floating-point operations, with about two for every number that feeds a statistic."""
        numbers = sum(counts.size(g) for g in self.tail.grads)
        match strategy.name:
            case "summed":
                return self.plain_operations
            case "factored":
                return statistics * self.plain_operations
            case "centred":
                return statistics * (self.plain_operations + 4 * self.size * numbers)
            case "sparse":
                return 2 * statistics * self.size * sum(counts.size(v) for v in self.tail.factors)
            case "gram":
                return statistics * self.size * self.gram_operations
        return self.forming_operations + self.size * 2 * statistics * numbers

    def temporary(self, strategy: Strategy) -> float:
        """Bytes of temporary memory."""
        match strategy.name:
            case "summed":
                return 0
            case "factored":
                return self.factors
            case "centred":
                return self.gradient
            case "gram":
                return 2 * self._positions**2 * 4 if self._positions > 1 else 0
            case "streamed":
                at_a_time = strategy.at_a_time if isinstance(strategy, Streamed) else 1
                return self.formed * min(at_a_time, self.size)
            case "materialise":
                return self.formed * self.size
            case "sparse":
                lookups = [term for term in self.tail.terms if isinstance(term, Lookup)]
                rows = sum(t.contributions * counts.nbytes(t.out) / t.table for t in lookups)
                return self.size * rows * (1 + self.statistics)
        raise AssertionError(strategy.name)

    def fitted(self, strategy: Strategy, at_a_time: int | None = None) -> Strategy:
        """The strategy as this device likes it; streams with `at_a_time` examples, if given."""
        match strategy:
            case Streamed():
                return self.streamed(at_a_time)
            case Gram():
                products = self.gram_operations
                looped = products / self.device.product_rate + self.device.loop_step
                return Gram(batched=products / self.device.batched_rate < looped)
        return strategy

    def streamed(self, at_a_time: int | None = None) -> Streamed:
        """The streamed strategy with `at_a_time` examples, or as many as this device likes."""
        batched = self.device.stream_size > 0
        return Streamed(max(1, min(at_a_time or self._liked(), self.size)), batched=batched)

    def _liked(self) -> int:
        """How many examples should go through one step of a stream."""
        if self.device.stream_size:
            return int(self.device.stream_size / max(self.formed, 1))
        if self.convolves:
            return 1  # patches of a convolution take longer than passes over the states
        products = (self.term_operations + self.step_operations) / self.device.product_rate
        passes = self._memory(self.gradient * (1 + 2 * self.statistics), at_once=0)
        return 4 if passes > 0.4 * products else 1

    def _memory(self, moved: float, at_once: float | None = None) -> float:
        fits = (moved if at_once is None else at_once) <= self.device.cache_size
        return moved / (self.device.cache_rate if fits else self.device.memory_rate)
