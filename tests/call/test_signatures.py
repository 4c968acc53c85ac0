"""What the public functions say of themselves, and what the functions say that they return.

That a type checker sees wrong names and words of options is in `typed.py`, which `make lint` reads.
"""

import functools
import inspect
import pydoc
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from pergrad._call import StrategyName
from pergrad._strategies import STRATEGIES

OPTIONS = {
    "batch_argnums": 1,
    "has_aux": False,
    "keep_batch_dim": True,
    "rng_argnums": (),
    "shared_argnums": (),
    "microbatch_size": None,
    "spmd_axis_name": None,
    "param_specs": None,
    "strategy": "auto",
    "nonfinite": "keep",
}


def functions():
    nnx = pytest.importorskip("pergrad.nnx")
    return [
        *(pg.value_and_stats, pg.grad_stats, pg.explain, pg.check),
        *(nnx.value_and_stats, nnx.explain, nnx.check),
    ]


# The functions.


def test_options_are_the_same_everywhere():
    like = inspect.signature(pg.value_and_stats).parameters
    assert list(like) == ["fun", "stats", "argnums", *OPTIONS]
    for fun in functions():
        own = dict(inspect.signature(fun).parameters)
        own_names = set(own)
        special = [own.pop(name) for name in ("wrt", "rtol") if name in own]
        assert all(p.kind is p.KEYWORD_ONLY for p in special)
        assert list(own) == [name for name in like if name in own]
        # A check compares examples, and drops none.
        assert set(like) - set(own) <= ({"stats", "nonfinite"} if "rtol" in own_names else set())
        assert all(own[name] == like[name] for name in own), "kind, default and type are the same"


def test_defaults():
    parameters = inspect.signature(pg.value_and_stats).parameters
    assert {name: parameters[name].default for name in OPTIONS} == OPTIONS
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OPTIONS)


def test_strategies_that_editors_offer():
    literal, other = typing.get_args(StrategyName)
    assert other is str
    assert set(typing.get_args(literal)) == {"auto", *(strategy.name for strategy in STRATEGIES)}


# The functions that they return.


def loss(params, batch, scale=1.0):
    """Half the mean square.

    An indented line:
        here.
    """
    return scale * jnp.mean(jnp.square(batch @ params)) / 2


class Loss:
    """A loss that is an object."""

    def __call__(self, params, batch):
        """Squares."""
        return loss(params, batch)

    def method(self, params, batch, *, scale=1.0):
        return loss(params, batch, scale)


class Undocumented:
    def __call__(self, params, batch):
        return loss(params, batch)


def any_arguments(*args, **kwargs):
    return loss(*args, **kwargs)


PARAMS = np.ones(2, np.float32)
BATCH = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)
STATS = {"mean": pg.Mean(), "norm": pg.Norm()}
MAKERS = [pg.value_and_stats, pg.grad_stats, pg.explain]


def text_of(function):
    """What `help` shows."""
    return pydoc.plain(pydoc.render_doc(function))


def shown(function):
    return str(inspect.signature(function))


@pytest.mark.parametrize("make", MAKERS)
def test_named_and_signed_like_the_loss(make):
    function = make(loss, STATS)
    assert (function.__name__, function.__qualname__) == ("loss", "loss")
    assert function.__module__ == __name__
    assert function.__wrapped__ is loss
    assert shown(function) == "(params, batch, scale=1.0, *, example_weights=None)"
    direction = make(loss, [pg.Dot()])
    assert shown(direction) == "(params, batch, scale=1.0, *, example_weights=None, direction=None)"
    assert shown(pg.check(loss)) == "(params, batch, scale=1.0)"


def test_help_tells_what_is_taken_and_returned():
    text = text_of(pg.value_and_stats(loss, STATS))
    assert "loss(params, batch, scale=1.0, *, example_weights=None)" in text
    for line in (
        "The value of the loss and statistics of its per-example gradients.",
        "Takes the arguments of `loss` (params, batch, scale) and by keyword:",
        "  example_weights: one weight for each example",
        "Returns (value, stats)",
        "  value: the mean of the examples' losses, counted with their weights.",
        "  stats: the results of {'mean': Mean(), 'norm': Norm()}, in the same tree.",
        "The docstring of `loss`:",
        "  Half the mean square.",
        "      here.",
    ):
        assert f"\n    {line}" in text
    assert "direction" not in text
    assert "aux" not in text


def test_help_depends_on_what_was_asked_for():
    text = text_of(pg.value_and_stats(loss, pg.Dot(), has_aux=True))
    assert "direction: a tree like the parameters" in text
    assert "Returns ((value, aux), stats)\n" in text
    assert "aux: what the loss returns beside its value" in text
    assert "Returns stats\n" in text_of(pg.grad_stats(loss, STATS))
    assert "Returns (stats, aux)\n" in text_of(pg.grad_stats(loss, STATS, has_aux=True))
    assert "Returns a `pergrad.Plan`" in text_of(pg.explain(loss, STATS))
    check = text_of(pg.check(loss))
    assert "Takes the arguments of `loss` (params, batch, scale).\n" in check
    assert "example_weights" not in check


CALLABLES = {
    "lambda": (lambda p, x: loss(p, x), "<lambda>", "(p, x, *, example_weights=None)", None),
    "partial": (
        functools.partial(loss, scale=3.0),
        *("loss", "(params, batch, *, scale=3.0, example_weights=None)", "Half the mean square."),
    ),
    "partial of jax": (
        jax.tree_util.Partial(loss),
        *("loss", "(params, batch, scale=1.0, *, example_weights=None)", "Half the mean square."),
    ),
    "jit": (
        jax.jit(loss),
        *("loss", "(params, batch, scale=1.0, *, example_weights=None)", "Half the mean square."),
    ),
    "jit of a partial": (
        jax.jit(functools.partial(functools.partial(loss, scale=3.0))),
        *("loss", "(params, batch, *, scale=3.0, example_weights=None)", "Half the mean square."),
    ),
    "object": (Loss(), "Loss", "(params, batch, *, example_weights=None)", "Squares."),
    "undocumented": (Undocumented(), "Undocumented", "(params, batch, *, example_weights=None)", None),
    "method": (Loss().method, "method", "(params, batch, *, scale=1.0, example_weights=None)", None),
    "any arguments": (any_arguments, "any_arguments", "(*args, example_weights=None, **kwargs)", None),
}


@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.parametrize("make", MAKERS)
def test_any_callable(make, name):
    fun, own_name, signature, doc = CALLABLES[name]
    function = make(fun, STATS)
    assert function.__name__ == own_name
    assert shown(function) == signature
    own_doc = f"The docstring of `{own_name}`:\n\n  {doc}"
    assert own_doc in function.__doc__ if doc else "The docstring of" not in function.__doc__
    assert not hasattr(function, "scale")
    function(PARAMS, BATCH, example_weights=np.ones(2, np.float32))
    text_of(function)


def test_a_callable_that_hides_its_parameters():
    class Hidden:
        __signature__ = "not a signature"

        def __call__(self, params, batch):
            return loss(params, batch)

    function = pg.value_and_stats(Hidden(), STATS)
    assert shown(function) == "(*args: 'Any', example_weights: 'Any' = None, **kwargs: 'Any') -> 'Any'"
    assert "Takes the arguments of `Hidden` and by keyword:\n" in function.__doc__


def test_a_loss_with_a_keyword_of_ours():
    """By keyword the weights are ours, by place they are the loss's: no signature can say that."""

    def weighted(params, batch, example_weights):
        return loss(params, batch) * jnp.mean(example_weights)

    function = pg.grad_stats(weighted, pg.Mean())
    assert shown(function).startswith("(*args")
    assert jnp.allclose(function(PARAMS, BATCH, 2.0), 2 * pg.grad_stats(loss, pg.Mean())(PARAMS, BATCH))


def test_jit_finds_static_arguments_by_name():
    def powered(params, batch, power, *, negative=False):
        assert isinstance(power, int) and isinstance(negative, bool)
        return (-1 if negative else 1) * jnp.mean((batch @ params) ** power)

    function = jax.jit(pg.grad_stats(powered, pg.Mean()), static_argnames=("power", "negative"))
    mean = function(PARAMS, BATCH, 2, negative=True)
    assert jnp.allclose(mean, -jax.grad(powered)(PARAMS, BATCH, 2))
    assert "jit_powered" in function.lower(PARAMS, BATCH, power=2).as_text()


def test_plan_takes_the_arguments_of_the_statistics():
    direction = {"direction": PARAMS, "example_weights": np.ones(2, np.float32)}
    plan = pg.explain(loss, [pg.Dot(), pg.Mean()])(PARAMS, BATCH, **direction)
    assert plan.batch_size == 2


def test_module_of_equinox():
    eqx = pytest.importorskip("equinox")

    class Regression(eqx.Module):
        scale: jax.Array

        def __call__(self, params, batch):
            """Regresses."""
            return loss(params, batch, self.scale)

    for fun, name in [(Regression(jnp.float32(2)), "Regression"), (eqx.filter_jit(loss), "loss")]:
        function = pg.value_and_stats(fun, STATS)
        assert function.__name__ == name
        assert shown(function).startswith("(params, batch, ")
        assert not hasattr(function, "scale")
        function(PARAMS, BATCH)


def test_wrappers_that_look_at_signatures():
    """They bind the arguments of a call to the signature, and fill in defaults."""
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    function = pg.grad_stats(loss, STATS)
    weights = np.array([1.0, 3.0], np.float32)
    expected = function(PARAMS, BATCH, 2.0, example_weights=weights)
    for wrapped in (jax.jit(function), eqx.filter_jit(function), nnx.jit(function)):
        for call in (
            lambda wrapped=wrapped: wrapped(PARAMS, BATCH, 2.0, example_weights=weights),
            lambda wrapped=wrapped: wrapped(PARAMS, BATCH, scale=2.0, example_weights=weights),
        ):
            assert jax.tree.all(jax.tree.map(jnp.allclose, call(), expected))


def test_modules_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    pergrad_nnx = pytest.importorskip("pergrad.nnx")

    def module_loss(model, batch, *, scale=1.0):
        """Of a module."""
        return scale * jnp.mean(model(batch))

    made = [
        pergrad_nnx.value_and_stats(module_loss, STATS),
        pergrad_nnx.explain(module_loss, STATS),
        pergrad_nnx.check(module_loss),
    ]
    for function in made:
        assert function.__name__ == "module_loss"
        assert function.__wrapped__ is module_loss
        text = text_of(function)
        assert "Takes the arguments of `module_loss` (model, batch, scale)" in text
        assert "Of a module." in text
        function(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), BATCH)
        # nnx.vmap binds the arguments of a call to the signature and refuses keywords with defaults.
        assert shown(function).startswith("(*args: 'Any', **kwargs: 'Any')")
