"""What reducing a tail costs in seconds on a kind of device, by strategy.

From three counts: operations of products, bytes read and written, steps of loops. With F operations
and g bytes for one example's gradient, f bytes of factors for all B examples, and s statistics,

    summed        B F / product rate  + (f + g) / memory rate
    factored      B F / product rate  + (2 f + g) / memory rate           for each statistic
    streamed      B F / product rate  + B g (1 + 2 s) / memory rate       + B loop steps
    materialise   B F / batched rate  + B g (1 + s) / memory rate
    sparse        (2 + s) bytes of the rows and the tables / memory rate

What fits into the cache is read and written at the cache's rate. The rates are rough on purpose: what
they decide differs by factors, not by percents.
"""

from __future__ import annotations

import dataclasses

import jax

from pergrad import _cost
from pergrad._compat import aval
from pergrad._statistics import accumulation_dtype
from pergrad._tail import Tail
from pergrad.strategies import Strategy, Streamed
from pergrad.terms import Lookup


@dataclasses.dataclass(frozen=True)
class Backend:
    """What the plan knows about a kind of device. Rates are per second, sizes in bytes."""

    name: str
    product_rate: float
    batched_rate: float
    memory_rate: float
    cache_rate: float
    cache_size: float
    loop_step: float
    stream_batched: bool
    stream_size: float
    working_set: float


BACKENDS = {
    # Measured on two cores. A batched product is a loop over products that use one core each.
    "cpu": Backend("cpu", 2e11, 1e10, 2e10, 6e10, 6.4e7, 1e-5, False, 0, 8e7),
    # Not measured. Batched products run at full rate, and loops should have few and large steps.
    "gpu": Backend("gpu", 5e13, 5e13, 1e12, 1e12, 4e7, 2e-5, True, 2.56e8, 1e11),
    "tpu": Backend("tpu", 1e14, 1e14, 1e12, 1e12, 1e8, 1e-5, True, 2.56e8, 1e11),
}


def backend() -> Backend:
    """The kind of device that programs run on by default."""
    return BACKENDS.get(jax.default_backend(), BACKENDS["gpu"])


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices of reducing `tail` over `size` examples to `statistics` statistics."""

    tail: Tail
    size: int
    statistics: int
    device: Backend

    @property
    def operations(self) -> float:
        """F: of one example's gradients."""
        terms = [term.eqn for term in self.tail.terms if term.eqn is not None]
        return _cost.operations([*terms, *self.tail.steps])

    @property
    def gradient(self) -> float:
        """g: bytes of one example's gradients, kept wide."""
        return sum(_cost.size(g) * accumulation_dtype(aval(g).dtype).itemsize for g in self.tail.grads)

    @property
    def factors(self) -> float:
        """f: bytes of all examples' factors."""
        return self.size * sum(_cost.nbytes(v) for v in self.tail.factors)

    def seconds(self, strategy: Strategy) -> float:
        """The price of one strategy, for all statistics if it forms gradients, else for one."""
        d, b, f, g, s = self.device, self.size, self.factors, self.gradient, self.statistics
        products = b * self.operations / d.product_rate
        match strategy.name:
            case "summed":
                return products + self._memory(f + g)
            case "factored":
                return products + self._memory(2 * f + g)
            case "streamed":
                passes = self._memory(b * g * (1 + 2 * s), at_once=g * (1 + s))
                return products + passes + b * d.loop_step
            case "materialise":
                return b * self.operations / d.batched_rate + self._memory(b * g * (1 + s))
            case "sparse":
                return self._memory((2 + s) * (f + g))
        raise AssertionError(strategy.name)

    def seconds_of_joining(self) -> float:
        """The price of feeding one more statistic where a pass for others runs anyway."""
        g = self.gradient
        if any(isinstance(term, Lookup) for term in self.tail.terms) and len(self.tail.terms) == 1:
            return self._memory(self.factors)
        return self._memory(self.size * g, at_once=g * (1 + self.statistics))

    def operations_of(self, strategy: Strategy, statistics: int) -> float:
        """Floating-point operations, with about two for every number that feeds a statistic."""
        products = self.size * self.operations
        numbers = sum(_cost.size(g) for g in self.tail.grads)
        match strategy.name:
            case "summed":
                return products
            case "factored":
                return statistics * products
            case "sparse":
                return 2 * statistics * self.size * sum(_cost.size(v) for v in self.tail.factors)
        return products + 2 * statistics * self.size * numbers

    def temporary(self, strategy: Strategy) -> float:
        """Bytes of temporary memory."""
        match strategy.name:
            case "summed":
                return 0
            case "factored":
                return self.factors
            case "streamed":
                at_a_time = strategy.at_a_time if isinstance(strategy, Streamed) else 1
                return self.gradient * min(at_a_time, self.size)
            case "materialise":
                return self.gradient * self.size
            case "sparse":
                (lookup,) = self.tail.terms
                assert isinstance(lookup, Lookup)
                row = _cost.nbytes(lookup.out) / lookup.table
                return self.size * lookup.contributions * row * (1 + self.statistics)
        raise AssertionError(strategy.name)

    def streamed(self) -> Streamed:
        """The streamed strategy with as many examples at a time as this device likes."""
        if not self.device.stream_batched:
            return Streamed()
        at_a_time = max(1, int(self.device.stream_size / max(self.gradient, 1)))
        return Streamed(min(at_a_time, self.size), batched=True)

    def _memory(self, moved: float, at_once: float | None = None) -> float:
        fits = (moved if at_once is None else at_once) <= self.device.cache_size
        return moved / (self.device.cache_rate if fits else self.device.memory_rate)
