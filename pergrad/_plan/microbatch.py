"""How many examples go through the model at a time with `microbatch_size="auto"`: the cheapest size.

A batch has B examples, and a microbatch has m of them. An example has a bytes of activations.
Parameters have p bytes, and the states of all statistics have q bytes. Tables that are only looked up
count in neither, because few of their rows are read or changed. Products in loops of the model read r
bytes of parameters, which count as often as there are rounds. The program has n equations. Then the
price is

    m a / fresh rate                      if m a is more than the process keeps: the operating system
                                          then has to provide temporary memory and page it in
    + 0.4 s(m) / memory rate              the results of equations that do not fit into the cache, s(m)
                                          bytes for the batch, go through memory, if XLA does not fuse
                                          the equation into the one that reads its result
    + (B / m) ((p + 2 q) / memory rate)   every microbatch reads the parameters from memory, and reads
                                          and writes the states
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
counts half if only 2 m o is more, the result and an operand as large. The vector memory of a TPU holds
what belongs to one or two long sequences. For `jax.grad` of transformers, added up over microbatches of
m, XLA's compiler for the TPU v5e gives these times in ms, from which the 0.4 and the half were fitted:

    m                                               1      2      4      8
    12 layers, vocabulary 1024                   47.3   57.3           91.2
    12 layers, vocabulary 32768, scan, remat     96.3   96.4  121.2   130.0
    2 layers, vocabulary 32768                   27.2   22.1   25.3    26.7

With mean and second moment the last model takes 24.8, 26.7 and 27.6 ms for an m of 2, 4 and 8. The sizes
chosen for the models of the benchmark on the CPU do not depend on the two numbers.

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

from collections.abc import Callable, Sequence

import jax

from pergrad._compat import Atom, aval
from pergrad._cut import Cut
from pergrad._ir import Backend, Is, Loop, counts, those_that_are
from pergrad._plan.backbone import bytes_of, equations_of, parameters_read_in_loops, results_of
from pergrad._plan.choose import TailPlan
from pergrad._statistics import Accumulator, LeafStatistic, Phase

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
    """The divisor of the batch size with the least price, among those whose activations fit.

    `planned(size)` gives the plans of all tails for `size` examples at a time. If `drops` is true, all
    accumulators wait for norms. `room` is how many bytes the activations may take at the most.
    """
    eqns = equations_of(cut)
    a = activations(cut, 2) - activations(cut, 1)
    moved = _bytes_moved(cut, wanted)
    each = moved / device.memory_rate + device.loop_round
    each += counts.equations(eqns) * device.equation
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
        price = batch_size / m * each
        spilled = sum(o * times * _share_spilled(m * o, device) for o, times in results)
        price += batch_size * spilled * SPILLED / device.memory_rate
        if m * a > device.kept_size:
            price += m * a / device.fresh_rate
        if m < batch_size:
            price += batch_size * convolutions / device.looped_convolution_rate
        price *= device.example_axis if m > 1 and not has_loop else 1
        return price + (waiting(m) if waits else 0)

    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    return min([m for m in divisors if m * a <= min(device.working_set, room)] or [1], key=seconds)


def _share_spilled(nbytes: float, device: Backend) -> float:
    """The share of a result that goes through memory if it is not fused: 0, 1/2 or 1."""
    return ((nbytes > device.cache_size) + (2 * nbytes > device.cache_size)) / 2


def _bytes_moved(cut: Cut, wanted: Sequence[Sequence[LeafStatistic]]) -> float:
    """p + 2 q: the bytes of parameters and states that every microbatch reads and writes."""
    lookups = (t for t in cut.all_tails() if t.terms and all(term.is_lookup for term in t.terms))
    tables = {param for tail in lookups for param in tail.params}
    own = enumerate(zip(wanted, cut.program.grads, strict=True))
    return sum(
        counts.nbytes(grad) + 2 * _bytes_of_states(statistics, grad)  # a parameter is like its gradient
        for i, (statistics, grad) in own
        if i not in tables
    )


def _bytes_of_states(statistics: Sequence[LeafStatistic], grad: Atom) -> int:
    """The bytes of the states of all accumulators among a parameter's statistics."""
    accumulators = [s for s in statistics if isinstance(s, Accumulator)]
    states = jax.eval_shape(lambda: [s.init(aval(grad)) for s in accumulators])
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))


def activations(cut: Cut, size: int) -> float:
    """Temporary memory of `jax.grad` for `size` examples."""
    return bytes_of(cut, cut.program.jaxpr.eqns, size)
