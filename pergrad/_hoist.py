"""Between step 1 and step 2: sums over positions leave loops and branches.

The weights of a recurrence are constants of a loop, and their gradient adds up in its carry. With x_l
and d_l what is multiplied in step l of the loop,

    carry_l = carry_(l-1) + x_l^T d_l,     so that     g = carry_0 + sum_l x_l^T d_l:

the loop need not form the products. It hands out x_l and d_l, and the steps become one more axis to sum
over, in one product after the loop. The algebra is that of a sum over examples: a tail's steps commute
with it. A gradient that leaves a loop as an output [length, ...] is treated alike, without the sum, if
it cannot be reduced inside (`_cut`): because it is mixed with others after the loop, or because one of
the statistics wants it whole.

The branches of a conditional hand out the factors of their tails in the same way. Those of the branches
that are not taken are zeros, so that the gradient is the sum of what the tails of all branches make.

Only what is smaller than the gradient leaves. All else stays where it is, and the answer is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from pergrad import _compat
from pergrad._compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, aval
from pergrad._cost import size
from pergrad._eval import Env, evaluate, read
from pergrad._flow import is_in, variables, varying
from pergrad._loop import LOOPS, Loop
from pergrad._steps import ONE_TO_ONE
from pergrad._tail import Tail
from pergrad._trace import Program
from pergrad._walk import Walk
from pergrad.terms import Product, Term, is_zero


def hoist(program: Program, elementwise: bool) -> Program:
    """The same program with the factors of its tails outside of loops and branches.

    `elementwise` says whether all statistics are: then tails whose gradients leave a loop as outputs
    stay where they are.
    """
    jaxpr = program.jaxpr
    if not any(eqn.primitive in RULES for eqn in jaxpr.eqns):
        return program
    places = range(len(program.grads))
    walk = Walk(
        jaxpr.eqns,
        program.example,
        program.grads,
        [program.value, *program.aux],
        places if elementwise else (),
    )
    return program.replaced_by(_hoisted(walk, ClosedJaxpr(jaxpr, program.consts)))


def _hoisted(walk: Walk, program: ClosedJaxpr) -> ClosedJaxpr:
    """The program that `walk` went through, hoisted; it takes and gives the same."""
    jaxpr = program.jaxpr
    if not any(eqn.primitive in RULES for eqn in jaxpr.eqns):
        return program

    def run(*args: Any) -> list[Any]:
        env: Env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            is_chosen = eqn.primitive is primitives.cond_p and is_in(eqn.invars[0], walk.varies)
            rule = RULES.get(eqn.primitive) if walk.leaving[id(eqn)] or is_chosen else None
            if rule is None:
                evaluate([eqn], env)
            else:
                outs = rule(walk, eqn, [read(env, v) for v in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
        return [read(env, v) for v in jaxpr.outvars]

    return jax.make_jaxpr(run)(
        *(jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in jaxpr.invars)
    )


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A carry that adds up `addends`, in the equations `chain`."""

    carry: int
    addends: tuple[Atom, ...]
    chain: tuple[JaxprEqn, ...]


def _hoist_from_loop(walk: Walk, eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    loop = Loop.of(eqn)
    assert loop is not None
    leaving = walk.leaving[id(eqn)]
    reduced_inside = {o.result for o in walk.opened.get(id(eqn), ())}
    varies = [is_in(v, walk.varies) for v in eqn.invars]

    # First what stands deeper inside.
    results = loop.step.jaxpr.outvars
    inside = Walk(
        loop.step.jaxpr.eqns,
        loop.varying_inputs(varies),
        [results[k] for k in leaving],
        [v for k, v in enumerate(results) if k not in leaving],
        [i for i, k in enumerate(leaving) if k in reduced_inside],
    )
    loop = Loop(eqn, _hoisted(inside, loop.step))

    # In here all that changes from step to step counts as varying, so that what is constant in a tail
    # is constant in the loop.
    step = loop.step.jaxpr
    sums = [s for k in leaving if k < loop.num_carry and (s := _as_sum(loop, k)) is not None]
    outputs = [k for k in leaving if k >= loop.num_carry and k not in reduced_inside]
    grads = [a for s in sums for a in s.addends] + [step.outvars[k] for k in outputs]
    replaced = {s.carry for s in sums} | set(outputs)
    in_chains = {id(link) for s in sums for link in s.chain}
    consts_vary, carry_vary, xs_vary = loop.operands(varies)
    moving_inputs = [False] * len(consts_vary) + [True] * (len(carry_vary) + len(xs_vary))
    inputs = zip(step.invars, varies, moving_inputs, strict=True)
    inside = Walk(
        [e for e in step.eqns if id(e) not in in_chains],
        [v for v, varies, moves in inputs if varies or moves],
        grads,
        [v for k, v in enumerate(step.outvars) if k not in replaced],
    )
    tails = inside.tails(range(len(grads)), range(len(grads)), ())
    hoisted = [t for t in tails if _is_smaller(t)]
    out_of_loop = {i for t in hoisted for i in t.params}  # places in `grads`
    return _run_without(loop, ins, sums, outputs, grads, hoisted, out_of_loop, eqn, walk)


def _run_without(
    loop: Loop,
    ins: Sequence[Any],
    sums: Sequence[_Sum],
    outputs: Sequence[int],
    grads: Sequence[Atom],
    tails: Sequence[Tail],
    gone: set[int],
    eqn: JaxprEqn,
    walk: Walk,
) -> list[Any]:
    """Runs the loop without the gradients at the places `gone`, and makes these from their tails."""
    step = loop.step.jaxpr
    consts, init, xs = loop.operands(ins)
    _, carry_vars, xs_vars = loop.operands(step.invars)
    place_of = {}  # of an addend or an output in `grads`
    places = iter(range(len(grads)))
    addends_of = {s.carry: [next(places) for _ in s.addends] for s in sums}
    place_of = {k: next(places) for k in outputs}
    ended = {k for k, own in addends_of.items() if all(i in gone for i in own)}
    kept_carry = [k for k in range(loop.num_carry) if k not in ended]
    results = range(len(step.outvars))
    kept_outputs = [k for k in results[loop.num_carry :] if place_of.get(k, -1) not in gone]

    moving = varying(step.eqns, [*carry_vars, *xs_vars])
    handed_out = dict.fromkeys(v for t in tails for v in t.factors if v in moving and v not in xs_vars)

    def one_step(carry: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
        given = dict(zip(kept_carry, carry, strict=True))
        start = [given[k] if k in given else jnp.zeros_like(init[k]) for k in range(loop.num_carry)]
        env = loop.env(consts, start, x)
        evaluate(step.eqns, env)
        after = []
        for k in kept_carry:
            if k in addends_of and any(i in gone for i in addends_of[k]):
                rest = [read(env, grads[i]) for i in addends_of[k] if i not in gone]
                after.append(sum(rest, given[k]))
            else:
                after.append(read(env, step.outvars[k]))
        return after, ([read(env, step.outvars[k]) for k in kept_outputs], [env[v] for v in handed_out])

    ends, (ys, factors) = loop.run(one_step, [init[k] for k in kept_carry], xs)

    # What does not change in the loop is made once, outside.
    env = loop.env(consts, init, xs)
    _evaluate_still(step.eqns, env, moving)
    env |= dict(zip(handed_out, factors, strict=True))
    with _compat.at_line_of(eqn):
        made: dict[int, jax.Array] = {}
        for tail in tails:
            is_sum = {i for own in addends_of.values() for i in own} & set(tail.params)
            if is_sum:
                made |= dict(
                    zip(tail.params, _sum_over_steps(tail, env, moving, loop.length), strict=True)
                )
            if is_sum != set(tail.params):
                stacked = dict(zip(tail.params, _stack_over_steps(tail, env, moving), strict=True))
                made |= {i: g for i, g in stacked.items() if i not in is_sum}
        made = {i: g.astype(aval(grads[i]).dtype) for i, g in made.items()}

        out: dict[int, Any] = dict(zip([*kept_carry, *kept_outputs], [*ends, *ys], strict=True))
        init_atoms = loop.operands(eqn.invars)[1]
        for k, own in addends_of.items():
            parts = [made[i] for i in own if i in gone]
            if k in out:
                parts.append(out[k])
            elif not is_zero(init_atoms[k], walk.made_by):
                parts.append(init[k])
            out[k] = sum(parts[1:], parts[0])
        out |= {k: made[i] for k, i in place_of.items() if i in gone}
    return [out[k] for k in results]


def _as_sum(loop: Loop, carry: int) -> _Sum | None:
    """The carry as a sum: it comes in, is used once, in an addition, and so on until it goes out."""
    step = loop.step.jaxpr
    readers: dict[Var, list[JaxprEqn]] = {}
    for e in step.eqns:
        for v in e.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, []).append(e)
    v, end = loop.operands(step.invars)[1][carry], step.outvars[carry]
    addends: list[Atom] = []
    chain: list[JaxprEqn] = []
    while v is not end:
        if len(readers.get(v, ())) != 1 or v in step.outvars:
            return None
        (e,) = readers[v]
        if e.primitive not in ADDITIONS or aval(e.outvars[0]).shape != aval(v).shape:
            return None
        addends.append(e.invars[1] if e.invars[0] is v else e.invars[0])
        chain.append(e)
        v = e.outvars[0]
    if not chain or sum(v is out for out in step.outvars) > 1 or readers.get(v):
        return None
    return _Sum(carry, tuple(addends), tuple(chain))


def _is_smaller(tail: Tail) -> bool:
    """Whether what a tail is made of is smaller than what it makes."""
    return bool(tail.terms) and sum(map(size, tail.factors)) < sum(map(size, tail.grads))


def _sum_over_steps(tail: Tail, env: Env, moving: set[Var], length: int) -> list[jax.Array]:
    """The sum over the steps of a loop; in `env` what moves is [length, ...]."""
    sums = {term.out: _sum_of_term(term, env, moving, length) for term in tail.terms}
    return tail.from_sums(env, sums, length)


def _sum_of_term(term: Term, env: Env, moving: set[Var], length: int) -> jax.Array:
    still = [v for v in term.factors if v not in moving]
    if not still:
        return term.sum(env, 1)
    # sum_l x^T d_l = x^T sum_l d_l, and a term that does not change counts `length` times.
    if len(still) == len(term.factors) or isinstance(term, Product):
        once = env | {v: jnp.sum(env[v], axis=0) for v in term.factors if v in moving}
        times = length if len(still) == len(term.factors) else 1
        return term.sum({v: x[None] if v in term.factors else x for v, x in once.items()}, times)
    return term.sum(env | {v: jnp.broadcast_to(env[v], (length, *env[v].shape)) for v in still}, 1)


def _stack_over_steps(tail: Tail, env: Env, moving: set[Var]) -> list[jax.Array]:
    axes = [0 if v in moving else None for v in tail.factors]
    factors, constants = ([env[v] for v in vs] for vs in (tail.factors, tail.constants))
    return jax.vmap(lambda *factors: tail.gradients(factors, constants), in_axes=axes)(*factors)


def _hoist_from_branches(walk: Walk, eqn: JaxprEqn, ins: Sequence[Any]) -> list[Any]:
    index, *operands = ins
    leaving = walk.leaving[id(eqn)]
    varies = [is_in(v, walk.varies) for v in eqn.invars[1:]]
    branches: list[ClosedJaxpr] = []
    tails: list[list[Tail]] = []
    for branch in eqn.params["branches"]:
        for again in (True, False):  # first what stands deeper inside, then the branch itself
            jaxpr = branch.jaxpr
            inside = Walk(
                jaxpr.eqns,
                [v for v, varies in zip(jaxpr.invars, varies, strict=True) if varies],
                [jaxpr.outvars[k] for k in leaving],
                [v for k, v in enumerate(jaxpr.outvars) if k not in leaving],
            )
            branch = _hoisted(inside, branch) if again else branch
        branches.append(branch)
        tails.append(
            [t for t in inside.tails(range(len(leaving)), leaving, ()) if not _is_nothing(t, inside)]
        )

    # A result leaves the branches if it does so in all of them, with the others of its tail.
    gone = set(leaving)
    while (
        stay := {
            k
            for own in tails
            for t in own
            for k in t.params
            if not _is_smaller(t) or t.adds or not set(t.params) <= gone
        }
        & gone
    ):
        gone -= stay
    tails = [[t for t in own if set(t.params) <= gone] for own in tails]
    kept = [k for k in range(len(eqn.outvars)) if k not in gone]
    if not gone:
        kept = list(range(len(eqn.outvars)))

    def taken(number: int) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            jaxpr = branches[number].jaxpr
            env: Env = dict(
                zip(
                    [*jaxpr.constvars, *jaxpr.invars], [*branches[number].consts, *operands], strict=True
                )
            )
            evaluate(jaxpr.eqns, env)
            factors = [
                [
                    read(env, v) if n == number else jnp.zeros(aval(v).shape, aval(v).dtype)
                    for v in t.factors
                ]
                for n, own in enumerate(tails)
                for t in own
            ]
            return [read(env, jaxpr.outvars[k]) for k in kept], factors

        return run

    with _compat.at_line_of(eqn):
        runs = [taken(n) for n in range(len(branches))]
        if is_in(eqn.invars[0], walk.varies):
            # Mapped over examples all branches run in any case; so weights need not be copied for each.
            chosen = [run(*operands) for run in runs]
            results, factors = jax.tree.map(lambda *xs: lax.select_n(index, *xs), *chosen)
        else:
            results, factors = lax.switch(index, runs, *operands)
        out = dict(zip(kept, results, strict=True))
        parts: dict[int, list[jax.Array]] = {k: [] for k in gone}
        handed_out = iter(factors)
        for branch, own in zip(branches, tails, strict=True):
            env: Env = dict(
                zip(
                    [*branch.jaxpr.constvars, *branch.jaxpr.invars],
                    [*branch.consts, *operands],
                    strict=True,
                )
            )
            given = [v for v, varies in zip(branch.jaxpr.invars, varies, strict=True) if varies]
            moving = varying(branch.jaxpr.eqns, given)
            _evaluate_still(branch.jaxpr.eqns, env, moving)
            for tail in own:
                grads = tail.gradients(next(handed_out), [env[v] for v in tail.constants])
                for k, g in zip(tail.params, grads, strict=True):
                    parts[k].append(g.astype(aval(eqn.outvars[k]).dtype))
        for k, own_parts in parts.items():
            zeros = jnp.zeros(aval(eqn.outvars[k]).shape, aval(eqn.outvars[k]).dtype)
            out[k] = sum(own_parts[1:], own_parts[0]) if own_parts else zeros
    return [out[k] for k in range(len(eqn.outvars))]


def _evaluate_still(eqns: Sequence[JaxprEqn], env: Env, moving: set[Var]) -> None:
    """Runs the equations that depend on nothing that moves."""
    for eqn in eqns:
        if eqn.primitive in ONE_TO_ONE:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            env.update({out: read(env, v) for v, out in pairs if out not in moving})
        elif not eqn.effects and not moving & variables(eqn.invars):
            evaluate([eqn], env)


def _is_nothing(tail: Tail, walk: Walk) -> bool:
    """Whether the tail's gradients are zeros."""
    return all(is_zero(g, walk.made_by) for g in tail.grads)


ADDITIONS = (primitives.add_p, primitives.add_jaxvals_p)
RULES: dict[Primitive, Callable[[Walk, JaxprEqn, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(LOOPS, _hoist_from_loop),
    primitives.cond_p: _hoist_from_branches,
}
