"""How many examples go through the model at a time, if nobody says: the size with the least price.

For a microbatch of m out of B examples, with a bytes of activations for an example, p bytes of
parameters and of the states of all statistics, of which q bytes belong to tails in loops, and n
equations, the price is

    m a / fresh rate                      if m a is more than what the process keeps: temporary memory
                                          has to be had from the operating system and paged in
    + (B / m) (p / memory rate)           parameters and states come from memory for each microbatch
    + (B / m) (2 q / fresh rate)          states of tails in loops are copied into them and out of them
    + (B / m) (n equations + loop step)   every equation is started for each microbatch
    + the norms and clipped means         which cost less if a gradient is formed once for both (m = 1)
    + convolutions in a loop              if m < B: on the CPU XLA runs them several times slower there

and all of that times `example_axis` for m > 1, unless the model is a loop itself. An axis of examples
that XLA has to move about costs that much more, as measured for models without loops of their own; for
models with loops it has not been seen to matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pergrad._cut import Cut
from pergrad._ir import Backend, Is, Loop, counts, those_that_are
from pergrad._plan.backbone import bytes_of, equations_of
from pergrad._plan.choose import TailPlan
from pergrad._statistics import LeafStatistic

CONVOLUTIONS = those_that_are(Is.CONVOLUTION)


def choose_microbatch_size(
    cut: Cut,
    wanted: Sequence[Sequence[LeafStatistic]],
    batch_size: int,
    device: Backend,
    planned: Callable[[int], Sequence[TailPlan]],
) -> int:
    """The divisor of the batch size with the least price, among those whose activations fit.

    `planned` gives the plans of all tails for so many examples at a time.
    """
    eqns = equations_of(cut)
    a = activations(cut, 2) - activations(cut, 1)
    in_loops = {param for tail in cut.all_tails() if tail.levels for param in tail.params}
    numbers = [sum(s.accumulates for s in own) for own in wanted]
    states = [n * counts.nbytes(g) for n, g in zip(numbers, cut.program.grads, strict=True)]
    q = sum(states[param] for param in in_loops)
    p = sum(states) + sum(counts.nbytes(v) for v in cut.program.params)
    each = p / device.memory_rate + 2 * q / device.fresh_rate + device.loop_step
    each += counts.equations(eqns) * device.equation
    convolutions = counts.operations(eqn for eqn in eqns if eqn.primitive in CONVOLUTIONS)
    has_loop = any(Loop.of(eqn) is not None for eqn in eqns)

    def clipping(m: int) -> float:
        # More than one at a time are priced like all at once.
        at_a_time = 1 if m == 1 else batch_size
        return batch_size / at_a_time * sum(t.seconds_of_clipping for t in planned(at_a_time))

    clips = any(not s.shares_weights for own in wanted for s in own)

    def seconds(m: int) -> float:
        price = batch_size / m * each + (clipping(m) if clips else 0)
        if m * a > device.kept_size:
            price += m * a / device.fresh_rate
        if m < batch_size:
            price += batch_size * convolutions / device.looped_convolution_rate
        return price * (device.example_axis if m > 1 and not has_loop else 1)

    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    return min([m for m in divisors if m * a <= device.working_set] or [1], key=seconds)


def activations(cut: Cut, size: int) -> float:
    """Temporary memory of `jax.grad` for `size` examples."""
    return bytes_of(cut, cut.program.jaxpr.eqns, size)
