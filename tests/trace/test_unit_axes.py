"""Axes of length 1 leave programs, and the numbers stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pergrad._trace import inlined


def x(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape))


LABELS = np.array([[[2], [0], [9]]])  # the last is out of range
WINDOWS = lax.GatherDimensionNumbers(
    offset_dims=(1, 2, 3, 4), collapsed_slice_dims=(), start_index_map=(1, 2)
)


def labels_of(a):
    return jnp.take_along_axis(a, LABELS, axis=-1)


def windows_of(a):
    """At two places, one row and three columns of an array [1, 4, 5, 1]."""
    places = jnp.array([[1, 2], [3, 9]])
    return lax.gather(a, places, WINDOWS, slice_sizes=(1, 1, 3, 1), mode="clip")


# By name: a function, its arguments, and whether all its equations can do without axes of length 1.
PROGRAMS = {
    "elementwise": (lambda a, b: jnp.exp(a) * b + 2.0, (x(1, 3, 1), x(1, 3, 1)), True),
    "elementwise with a bias": (lambda a, b: jnp.exp(a) + b, (x(1, 3, 4), x(1, 1, 4)), False),
    "elementwise with means": (lambda a: a - a.mean(axis=(0, 2), keepdims=True), (x(1, 3, 4),), False),
    "scalars": (lambda a: jnp.where(a > 0, a, -a), (x(1, 1),), True),
    "reductions": (lambda a: a.sum(axis=(0, 2)) + a.max(axis=(0, 2)), (x(1, 3, 2),), True),
    "sum over one": (lambda a: a.sum(axis=0), (x(1, 3),), True),
    "product": (lambda a, b: jnp.einsum("bthd,bshd->bhts", a, b), (x(1, 3, 2, 4), x(1, 5, 2, 4)), True),
    "product over one": (lambda a, b: jnp.einsum("ij,jk->ik", a, b), (x(3, 1), x(1, 4)), True),
    "outer product": (lambda a, b: jnp.einsum("bi,bj->bij", a, b), (x(1, 3), x(1, 4)), True),
    "broadcast": (lambda a: jnp.broadcast_to(a[:, None], (2, 1, 5, 3)), (x(1, 3),), True),
    "broadcast of one": (lambda a: lax.broadcast_in_dim(a, (4, 3), (0, 1)), (x(1, 3),), True),
    "reshape": (lambda a: a.reshape(1, 6, 1, 2).reshape(3, 4), (x(1, 3, 4),), True),
    "transpose": (lambda a: a.transpose(2, 1, 0) + a.transpose(2, 1, 0), (x(1, 3, 4),), True),
    "transpose of one": (lambda a: a.T * 2, (x(1, 3),), True),
    "slice": (lambda a: lax.slice(a, (0, 1, 0), (1, 3, 5), (1, 1, 2)), (x(1, 4, 5),), True),
    "slice to one": (lambda a: a[:, 1:2], (x(1, 4),), False),
    "slice to none": (lambda a: a[0:0], (x(1, 4),), False),
    "pad": (lambda a: lax.pad(a, 0.0, [(0, 0, 0), (1, 2, 1)]), (x(1, 3),), True),
    "pad of one": (lambda a: lax.pad(a, 7.0, [(1, 0, 0), (0, 0, 0)]), (x(1, 3),), False),
    "pad that shifts one away": (lambda a: lax.pad(a, 7.0, [(1, -1, 0), (0, 0, 0)]), (x(1, 3),), False),
    "pad to one": (lambda a: lax.pad(a, 7.0, [(0, -2, 0)]), (x(3),), False),
    "concatenate": (lambda a, b: jnp.concatenate([a, b], 1), (x(1, 3), x(1, 2)), True),
    "concatenate ones": (lambda a, b: jnp.concatenate([a, b], 0), (x(1, 3), x(1, 3)), False),
    "split": (lambda a: jnp.split(a, 3, axis=-1), (x(1, 2, 6),), True),
    "split into ones": (lambda a: jnp.split(a, 3, axis=-1), (x(1, 3),), False),
    "what has no rule": (lambda a: jnp.cumsum(jnp.exp(a), axis=1) * a, (x(1, 4),), False),
    "lookup": (lambda a: jnp.exp(a)[:, jnp.array([[0, 2]])] * 2, (x(1, 4),), True),
    "lookup of one row": (lambda a: jnp.exp(a)[jnp.array([2])] * 2, (x(4, 3),), True),
    "lookup in one row": (lambda a: jnp.exp(a)[jnp.array([0, 1])] * 2, (x(1, 3),), False),
    "labels": (lambda a: labels_of(jnp.exp(a)) * 2, (x(1, 3, 4),), False),
    "windows": (lambda a: windows_of(jnp.exp(a)) * 2, (x(1, 4, 5, 1),), True),
    "gradient of a lookup": (
        lambda a, b: a.at[:, jnp.array([[3, 3, 7]])].add(jnp.exp(b)) * 2,
        (x(1, 4, 2), x(1, 1, 3, 2)),
        True,
    ),
    "gradient of labels": (
        jax.grad(lambda a: jnp.sum(labels_of(jnp.exp(a)) ** 2)),
        (x(1, 3, 4),),
        False,
    ),
    "gradient of windows": (
        jax.grad(lambda a: jnp.sum(windows_of(jnp.exp(a)) ** 2)),
        (x(1, 4, 5, 1),),
        True,
    ),
    "rows set to a number": (
        lambda a: a.at[:, jnp.array([2, 2])].set(0.0) * 2,
        (x(1, 4),),
        True,
    ),
    "call": (jax.jit(lambda a: jax.jit(jnp.tanh)(a * 2) + a), (x(1, 3),), True),
    "loop": (lambda a: lax.scan(lambda c, b: (c * b, c + a), a, x(3, 1, 2)), (x(1, 2),), False),
    "branches": (lambda a: lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, a * 2), (x(1, 2),), False),
    "remat": (jax.grad(lambda a: jnp.sum(jax.checkpoint(jnp.sin)(a * a))), (x(1, 2),), False),
    "half precision": (lambda a: a.astype(jnp.bfloat16).astype(a.dtype), (x(1, 3),), True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_numbers(name):
    fun, args, can_do_without = PROGRAMS[name]
    program = inlined(fun, *args)
    expected = jax.tree.leaves(fun(*args))
    actual = jaxpr_as_fun(program)(*args)
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-12)

    # Between the arguments, which lose their axes of length 1, and the results, which get them again.
    inside = [v for eqn in program.jaxpr.eqns for v in eqn.outvars if v not in program.jaxpr.outvars]
    # Indices keep the axis of their vectors, which may have length 1.
    numbers = [v for v in inside if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    if can_do_without:
        assert not any(1 in v.aval.shape for v in numbers)


@pytest.mark.parametrize("name", ["elementwise with a bias", "elementwise with means"])
def test_only_an_operand_that_is_repeated_keeps_an_axis(name):
    fun, args, _ = PROGRAMS[name]
    eqns = inlined(fun, *args).jaxpr.eqns
    (eqn,) = [e for e in eqns if e.primitive.name in ("add", "sub")]
    shapes = {v.aval.shape for v in eqn.invars}
    assert eqn.outvars[0].aval.shape == (3, 4)
    assert shapes == {(3, 4), (1, 4)} or shapes == {(3, 4), (3, 1)}
