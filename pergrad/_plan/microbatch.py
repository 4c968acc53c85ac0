"""How many examples go through the model at a time with `microbatch_size="auto"`: the cheapest size.

A batch has B examples, and a microbatch has m of them. An example has a bytes of activations.
Parameters have p bytes, and the states of all statistics have q bytes. Products in loops of the model
read r bytes of parameters, which count as often as there are rounds. The program has n equations. Then
the price is

    m a / fresh rate                      if m a is more than the process keeps: the operating system
                                          then has to provide temporary memory and page it in
    + 0.4 s(m) / memory rate              the results of equations that do not fit into the cache, s(m)
                                          bytes for the batch, go through memory, if XLA does not fuse
                                          the equation into the one that reads its result
    + (B / m) (p + 2 q) / memory rate     every microbatch reads the parameters from memory, and reads
                                          and writes the states (with exceptions, see below)
    + (B / m) (3 r / cache rate)          in every round of a loop, a product reads its parameter, writes
                                          it in the order that it needs, and reads what it has written
    + (B / m) (n equations + one round)   every microbatch starts each equation, and one round of a loop
    + convolutions in a loop              if m < B: on the CPU XLA runs them several times slower there

and all of that is multiplied by `example_axis` if m > 1, unless the model has loops of its own. XLA has
to move the axis of examples about, which was measured to cost that factor in models without loops. In
models with loops no such cost was seen. The tails come on top, not multiplied, since the price of
a strategy is that of so many examples already:

    + norms, and what waits for them      which costs less if a gradient is formed once for both (m = 1)

An equation's result of o bytes for one example counts in s(m) if m o is more than the cache holds. It
counts half if the result and an operand as large, 2 m o bytes, leave no room in the cache. The vector
memory of a TPU holds what belongs to one or two long sequences. For `jax.grad` of transformers, added up
over microbatches of m, XLA's compiler for the TPU v5e gives these times in ms. The 0.4 and the half were
fitted to them:

    m                                               1      2      4      8
    12 layers, vocabulary 1024                   47.3   57.3           91.2
    12 layers, vocabulary 32768, scan, remat     96.3   96.4  121.2   130.0
    2 layers, vocabulary 32768                   27.2   22.1   25.3    26.7

The sizes chosen for the models of the benchmark on the CPU do not depend on the two numbers.

Parameters and states have two exceptions:

- Of a table that is only looked up, few rows are read or changed, so neither it nor the states of sums
  count. A variance changes in every row, and its state counts as 4 q: what a microbatch adds to the
  state is written and read, too.
- Where copies run beside products (`copies_beside`, on a TPU), the traffic costs only what is left of
  it after the products of the same parameter. One of them forms the gradient, in m F_t operations, while
  the states are read and written. Two others, with as many operations each, read the parameter. States
  that fit into the cache together with the gradient are brought there while other products run, and
  cost nothing, unless they belong to layers in a loop.

By the compiler for the v5e, the model with 2 layers takes 20.4, 24.8 and 27.6 ms for mean and second
moment with an m of 1, 2 and 8. For five statistics it takes 47.6 ms with an m of 1 and 30.4 ms with an
m of 8: the states of its head and the variance of its table take 23 ms of traffic. Those of the layers
fit into the cache, so with 12 layers one example at a time is fastest: 99 ms for five statistics, and
113 and 111 ms with an m of 2 and 8. With these layers in a loop it takes 141 ms for any of the three.

The term with r is for recurrences. Their products have only as many rows as there are examples in a
microbatch, and bringing a parameter into order takes as long for few rows as for many. The factor 3 (a
read, a write, a read) is fitted to the benchmark and not well known:

    the log of the benchmark     an LSTM takes 85 ms with 32 examples at once, 103 ms with 16 (moments);
                                 a factor of 1 would choose 16, and 3 chooses 32
    the same on busy cores       138 ms and 120 ms: there 16 examples at once are faster
    LSTMs of other widths        the time for 0 examples, as a line through 2 to 16 has it, is 1, 0, 17
                                 and 46 ms for widths of 64, 128, 256 and 512; 3 r / cache rate is 1, 3,
                                 13 and 54 ms
    single products in a loop    in the same way, 1.1 to 1.5 times r / cache rate, as the mean of the
                                 forward and the backward pass, for widths of 128 to 512

The last three were measured on two cores that other programs used, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax

from pergrad._compat import Atom, aval
from pergrad._cut import Cut, Tail
from pergrad._ir import Backend, Is, Loop, counts, those_that_are
from pergrad._plan.backbone import bytes_of, equations_of, parameters_read_in_loops, results_of
from pergrad._plan.choose import TailPlan
from pergrad._statistics import Accumulator, LeafStatistic, Phase, Quantity

CONVOLUTIONS = those_that_are(Is.CONVOLUTION)
SPILLED = 0.4  # the share of large results that go through memory, because XLA does not fuse them


def choose_microbatch_size(
    cut: Cut,
    wanted: Sequence[Sequence[LeafStatistic]],
    batch_size: int,
    device: Backend,
    planned: Callable[[int], Sequence[TailPlan]],
    drops: bool,
    room: float,
) -> int:
    """The divisor of the batch size with the least price, among those that fit.

    `planned(size)` gives the plans of all tails for `size` examples at a time. If `drops` is true, all
    accumulators wait for norms. `room` is how many bytes activations and tails may take at the most.
    """
    eqns = equations_of(cut)
    a = activations(cut, 2, device) - activations(cut, 1, device)
    tails = [_Traffic.of(tail, wanted) for tail in cut.all_tails()]
    each = counts.equations(eqns) * device.equation + device.loop_round
    for nbytes, times in parameters_read_in_loops(eqns, cut.varies):
        rate = device.cache_rate if nbytes <= device.cache_size else device.memory_rate
        each += times * 3 * nbytes / rate
    results = list(results_of(cut))
    convolutions = counts.operations(eqn for eqn in eqns if eqn.primitive in CONVOLUTIONS)
    has_loop = any(Loop.of(eqn) is not None for eqn in eqns)

    def waiting(m: int) -> float:
        # Every microbatch of more than one example is priced as if all examples ran at once.
        at_a_time = 1 if m == 1 else batch_size
        return batch_size / at_a_time * sum(t.seconds_of_waiting for t in planned(at_a_time))

    waits = drops or any(s.phase is Phase.BY_NORM for own in wanted for s in own)

    def seconds(m: int) -> float:
        price = batch_size / m * (each + sum(tail.seconds(m, device) for tail in tails))
        spilled = sum(o * times * _share_spilled(m * o, device) for o, times in results)
        price += batch_size * spilled * SPILLED / device.memory_rate
        if m * a > device.kept_size:
            price += m * a / device.fresh_rate
        if m < batch_size:
            price += batch_size * convolutions / device.looped_convolution_rate
        price *= device.example_axis if m > 1 and not has_loop else 1
        return price + (waiting(m) if waits else 0)

    def fits(m: int) -> bool:
        if m * a > device.working_set:
            return False
        return room == math.inf or bytes_at_once(cut, planned(m), m, device) <= room

    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    return min([m for m in divisors if fits(m)] or [1], key=seconds)


def _share_spilled(nbytes: float, device: Backend) -> float:
    """The share of a result that goes through memory if it is not fused: 0, 1/2 or 1."""
    return ((nbytes > device.cache_size) + (2 * nbytes >= device.cache_size)) / 2


@dataclasses.dataclass(frozen=True)
class _Traffic:
    """What a microbatch reads and writes for the parameters of one tail.

    The parameters take p bytes, and `moved` is how many bytes of states are read and written. In one
    round of the loops around the tail its gradient and states take `at_once` bytes. There are so many
    `rounds`, and in each of them one example's terms take F_t operations.
    """

    p: float
    moved: float
    at_once: float
    rounds: int
    F_t: float

    @staticmethod
    def of(tail: Tail, wanted: Sequence[Sequence[LeafStatistic]]) -> _Traffic:
        rounds = math.prod(tail.lengths)
        g = p = moved = q = 0.0
        for grad, param in zip(tail.grads, tail.params, strict=True):
            accumulators = [s for s in wanted[param] if isinstance(s, Accumulator)]
            others = [s for s in accumulators if s.quantity is not Quantity.SUM]
            own = _bytes_of_states(accumulators, grad)
            g, q = g + counts.nbytes(grad), q + own
            p += 0 if tail.looks_up else counts.nbytes(grad)  # a parameter is like its gradient
            moved += 4 * _bytes_of_states(others, grad) if tail.looks_up else 2 * own
        operations = counts.operations(term.eqn for term in tail.terms if term.eqn is not None)
        return _Traffic(rounds * p, rounds * moved, g + q, rounds, operations)

    def seconds(self, m: int, device: Backend) -> float:
        """The seconds that the traffic adds to a microbatch of m examples."""
        reading, updating = self.p / device.memory_rate, self.moved / device.memory_rate
        if not device.copies_beside:
            return reading + updating
        product = self.rounds * m * self.F_t / device.product_rate
        if self.at_once <= device.cache_size and self.rounds == 1:
            updating = 0
        return max(0, reading - 2 * product) + max(0, updating - product)


def _bytes_of_states(accumulators: Sequence[Accumulator], grad: Atom) -> int:
    """The bytes of the states of these accumulators of a parameter with the gradient `grad`."""
    states = jax.eval_shape(lambda: [s.init(aval(grad)) for s in accumulators])
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))


def bytes_at_once(cut: Cut, tails: Iterable[TailPlan], size: int, device: Backend) -> float:
    """Temporary memory of `size` examples at a time.

    The tails run one after the other, so only the largest one counts.
    """
    return activations(cut, size, device) + max(tail.temporary_bytes for tail in tails)


def activations(cut: Cut, size: int, device: Backend) -> float:
    """Temporary memory of `jax.grad` for `size` examples."""
    return bytes_of(cut, cut.program.jaxpr.eqns, size, device.stores_less)
