"""Lookups come before differences and casts, and the numbers stay, to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pergrad._compat import drop_dead_code
from pergrad._trace.lookups import with_early_lookups

ROWS, COLUMNS = 5, 7
LABELS = jnp.array([0, 6, 3, 3, 2])
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, COLUMNS)), jnp.float32)


def picked(a, mode=None, fill_value=None, labels=LABELS):
    return jnp.take_along_axis(a, labels[:, None], axis=1, mode=mode, fill_value=fill_value)


def cross_entropy(x):
    return -jnp.mean(picked(jax.nn.log_softmax(x)))


def in_half_precision(x):
    return cross_entropy(x.astype(jnp.bfloat16).astype(jnp.float32))


def of_columns(x):
    log_probs = jax.nn.log_softmax(x.T, axis=0)
    return jnp.take_along_axis(log_probs, LABELS[None], axis=0)


def of_pictures(x):
    """Rows of two axes: the numbers that are subtracted have both of them."""
    log_probs = jax.nn.log_softmax(jnp.stack([x, 2 * x]))
    return jnp.take_along_axis(log_probs, jnp.stack([LABELS, LABELS])[..., None], axis=-1)


def minus_a_number(x):
    return picked(x - jnp.max(x))


def minus_an_array(x):
    return picked(x - jnp.exp(x))


def minus_columns(x):
    return picked(x - x.sum(axis=0, keepdims=True))


def array_minus_rows(x):
    return picked(x.sum(axis=1, keepdims=True) - x)


def by_two_indices(x):
    return jax.nn.log_softmax(x)[jnp.arange(ROWS), LABELS]


def of_outside(mode, fill_value=None):
    labels = LABELS.at[1].set(99)
    return lambda x: picked(jax.nn.log_softmax(x), mode, fill_value, labels)


# By name: a function of X, and how many arrays as large as X the program subtracts from or to.
PROGRAMS = {
    "cross-entropy": (cross_entropy, 1),
    "cross-entropy in half precision": (in_half_precision, 1),
    "columns": (of_columns, 1),
    "two axes of rows": (of_pictures, 1),
    "minus a number": (minus_a_number, 0),
    "minus an array": (minus_an_array, 1),
    "minus columns": (minus_columns, 1),
    "an array minus rows": (array_minus_rows, 1),
    "by two indices": (by_two_indices, 2),
    "out of range, filled": (of_outside("fill"), 1),
    "out of range, clipped": (of_outside("clip"), 1),
    "out of range, filled with a number": (of_outside("fill", 0.5), 2),
}


def large_differences(program):
    return sum(eqn.primitive is lax.sub_p and eqn.outvars[0].aval.size >= X.size for eqn in program.eqns)


@pytest.mark.parametrize("name", PROGRAMS)
def test_lookup(name):
    fun, expected = PROGRAMS[name]
    with jax.enable_checks(True):
        plain = jax.make_jaxpr(lambda x: jax.tree.leaves(_inlined(fun, x)))(X)
        early = with_early_lookups(plain, [X])
    assert large_differences(drop_dead_code(early.jaxpr)) == expected
    for before, after in zip(jaxpr_as_fun(plain)(X), jaxpr_as_fun(early)(X), strict=True):
        np.testing.assert_array_equal(before, after)
    if expected == large_differences(drop_dead_code(plain.jaxpr)):
        assert early is plain


def _inlined(fun, x):
    with jax.disable_jit():
        return fun(x)
