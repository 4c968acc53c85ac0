"""Random small programs against the oracle: a program is made from its seed alone, checked, and reduced.

A program is a loss (`Network`) and a call of `value_and_stats` (`Call`), described by names, so that a
failure prints a program that can be read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pergrad as pg
from pergrad._strategies import STRATEGIES
from tests.support import bounds, oracle
from tests.support.bounds import STATISTICS, UNITS, assert_agrees, scales
from tests.support.cases import BATCH, array
from tests.support.program_edges import HEADS, WITH_KEY, WITHOUT_KEY
from tests.support.program_parts import (
    DECIDED_BY_ACTIVATIONS,
    FEATURES,
    IGNORED,
    NONLINEARITIES,
    POSITIONS,
    REGULARISERS,
    VIEWS,
    VOCABULARY,
    WRAPPERS,
    Parameters,
    Tree,
)
from tests.support.truth import Truth
from tests.support.whole import SEVERAL, Questions, of_positions

OPERATIONS = WITHOUT_KEY | WITH_KEY
# More than for the cases in float64: a random network may be badly conditioned.
ERROR = bounds.ERROR | {"float64": 1e-9}


@dataclass(frozen=True)
class Layer:
    operation: str = "dense"
    view: str = "plain"
    nonlinearity: str = ""
    wrapper: str = ""
    own: bool = True  # False: uses the parameters of the layers before it where it can
    is_half: bool = False  # computes in bfloat16, if the network's precision is mixed


@dataclass(frozen=True)
class Network:
    layers: tuple[Layer, ...]
    head: str = "squares"
    regulariser: str = ""
    precision: str = "float64"  # or "mixed": parameters in float32, some layers in bfloat16

    @property
    def dtype(self) -> str:
        """The dtype of parameters and inputs."""
        return "float64" if self.precision == "float64" else "float32"

    def forward(self, p: Parameters, e: Tree) -> tuple[Array, Array]:
        """The loss of examples `e` and the last activations."""
        h = e["x"]
        for number, layer in enumerate(self.layers):
            run = self._layer(p, e, layer, number)
            # The first pass makes parameters, which a wrapper would trace.
            h = run(None, h) if p.rng is not None else WRAPPERS[layer.wrapper](run)(p.values, h)
        regulariser = REGULARISERS[self.regulariser](p.values)
        return HEADS[self.head](h, e) + regulariser.astype(h.dtype), h

    def _layer(
        self, p: Parameters, e: Tree, layer: Layer, number: int
    ) -> Callable[[Tree, Array], Array]:
        def run(values: Tree, h: Array) -> Array:
            inside = Parameters(values=values) if p.rng is None else p
            own = h.dtype
            if layer.is_half and self.precision == "mixed":
                h = h.astype(jnp.bfloat16)

            def w(n: int, m: int) -> Array:
                name = f"{n}x{m}" if not layer.own else f"{number}: {n}x{m}"
                return VIEWS[layer.view](inside, f"{name} {layer.view}", n, m).astype(h.dtype)

            out = OPERATIONS[layer.operation](h, e, w)
            return NONLINEARITIES[layer.nonlinearity](out).astype(own)

        return run

    def params(self, e: Tree, seed: int) -> Tree:
        p = Parameters(seed)
        p("unused", 2)
        jax.eval_shape(lambda e: self.forward(p, e), e)  # nothing is compiled
        return jax.tree.map(lambda x: np.asarray(x, self.dtype), p.values)


# The arguments of a loss. "some" and "others" share out the parameters, "x" and "rest" the batch.
FORMS = {
    "one batch": ("params", "batch"),
    "two batches": ("params", "x", "rest"),
    "batch first": ("batch", "params"),
    "batches around": ("x", "params", "rest"),
    "parameters around": ("some", "batch", "others"),
    "scale": ("params", "batch", "scale"),
    "key": ("params", "batch", "key"),
    "raw key": ("params", "batch", "raw key"),
    "key between": ("params", "x", "key", "rest"),
    "key first": ("key", "some", "batch", "others"),
}
PARAMETERS, BATCHES, KEYS = ("params", "some", "others"), ("batch", "x", "rest"), ("key", "raw key")

# What is asked for: statistics of `bounds`, and of whole gradients. The backward pass may start from the
# weight of an example for the first two. The fourth can be had inside of loops.
MOMENTS = ["mean", "square", "cos", "variance"]
ASKED: dict[str, tuple[list[str], list[str]]] = {
    "mean": (["mean"], []),
    "powers": (["mean", "square", "cube", "loss"], []),
    "moments": (MOMENTS, []),
    "in parts": (["square"], ["norm_by_leaf", "dot", "dot_where"]),
    "projected": (["mean"], ["projected", "projected_where", "norm"]),
    "whole": ([*MOMENTS, "fold", "individual"], []),
    "clipped": (["count"], ["gram_where", "clipped_square", "clipped_by_leaf"]),
    "clipped mean": (["mean"], ["clipped", "norm_where"]),
    "weighted": (["square"], ["weighted", "weighted_square_where", "norm_by_group"]),
    "clipped groups": (["mean", "count"], ["clipped_by_group", "weighted"]),
    "signs": (["abs", "sign", "signed_square"], []),
    "tokens": (["token_mean"], ["norm", "gram"]),
    "positions": (["token_mean"], ["dot"]),
    "units": (["group_square", "single_square", "group_mean"], []),
}


@dataclass(frozen=True)
class Call:
    form: str = "one batch"
    asked: str = "mean"
    size: int = 3
    weights: tuple[float, ...] | None = None
    blank: int = 0  # the examples before this one are zero and have no labels
    padding: float = 0.0  # what the examples of weight 0 are filled with; 0: they are like the others
    keep_batch_dim: bool = True
    has_aux: bool = False
    microbatch_size: int | str | None = None
    strategy: str = "auto"
    nonfinite: str = "keep"  # or "drop": the examples of weight 0 count, and are dropped if not finite

    def argnums(self, names: Sequence[str]) -> int | tuple[int, ...]:
        """The places of the arguments with these names."""
        numbers = tuple(n for n, name in enumerate(FORMS[self.form]) if name in names)
        return numbers[0] if len(numbers) == 1 else numbers

    @property
    def options(self) -> dict[str, Any]:
        return dict(
            argnums=self.argnums(PARAMETERS),
            batch_argnums=self.argnums(BATCHES),
            rng_argnums=self.argnums(KEYS),
            has_aux=self.has_aux,
            keep_batch_dim=self.keep_batch_dim,
        )

    @property
    def given_weights(self) -> tuple[float, ...] | None:
        """The weights that the call is given. Those that are to be dropped count until then."""
        if self.weights is None or self.nonfinite == "keep":
            return self.weights
        return tuple(w or 1.0 for w in self.weights)


@dataclass(frozen=True)
class RandomProgram:
    network: Network
    call: Call
    seed: int  # of the numbers

    def loss(self, *args: Any) -> Any:
        given = dict(zip(FORMS[self.call.form], args, strict=True))
        params = {k: v for name in PARAMETERS for k, v in given.get(name, {}).items()}
        e = {k: v for name in BATCHES for k, v in given.get(name, {}).items()}
        if not self.call.keep_batch_dim:
            e = jax.tree.map(lambda x: x[None], e)
        e["key"] = given.get("key", given.get("raw key"))
        value, h = self.network.forward(Parameters(values=params), e)
        value = value * given["scale"] if "scale" in given else value
        return (
            (value, {"pooled": jnp.sum(h), "shape": jnp.int32(h.size)}) if self.call.has_aux else value
        )

    def args(self) -> tuple[Any, ...]:
        call, dtype = self.call, self.network.dtype
        batch = self._batch()
        key = jax.random.key(self.seed)
        params = self.network.params(batch | {"key": key}, self.seed)
        others = sorted(params)[::2]
        given = {
            "params": params,
            "some": {k: v for k, v in params.items() if k not in others},
            "others": {k: v for k, v in params.items() if k in others},
            "batch": batch,
            "x": {"x": batch["x"]},
            "rest": {k: v for k, v in batch.items() if k != "x"},
            "scale": np.asarray(0.7, dtype),
        }
        arrays = [
            jax.tree.map(array, given[name]) if name in given else name for name in FORMS[call.form]
        ]
        keys = {"key": key, "raw key": jax.random.key_data(key)}
        return tuple(keys[x] if isinstance(x, str) else x for x in arrays)

    def _batch(self) -> dict[str, np.ndarray]:
        r, call = np.random.default_rng(self.seed), self.call
        shape = (call.size, POSITIONS)
        x = r.normal(size=(*shape, FEATURES))
        tokens, ids = r.integers(VOCABULARY, size=shape), r.integers(-2, VOCABULARY + 2, size=shape)
        tokens[:, -1] = tokens[:, 0]  # a token that comes twice
        labels = np.where(r.random(shape) < 0.3, IGNORED, r.integers(VOCABULARY, size=shape))
        ids[:, 1] = np.where(r.random(call.size) < 0.5, ids[:, 0], r.choice([IGNORED, 10**6]))
        x[: call.blank], labels[: call.blank] = 0, IGNORED
        x[-1, r.integers(POSITIONS)] *= r.integers(2)  # a blank position, perhaps
        if call.padding and call.weights is not None:
            is_padding = np.asarray(call.weights) == 0
            x[is_padding], ids[is_padding], labels[is_padding] = call.padding, 10**6, 10**6
        whole = {"tokens": tokens, "ids": ids, "labels": labels}
        return {"x": x.astype(self.network.dtype)} | {k: v.astype(np.int32) for k, v in whole.items()}

    def __str__(self) -> str:
        """What differs from the simplest program."""
        parts = [_differences(layer, Layer(""), ("operation",)) for layer in self.network.layers]
        parts.append(_differences(self.network, Network(()), (), skipped=("layers",)))
        parts.append(_differences(self.call, Call(), ("form", "asked", "size")))
        return "; ".join(part for part in parts if part)


def _differences(x: Any, plain: Any, shown: Sequence[str], skipped: Sequence[str] = ()) -> str:
    names = [field.name for field in fields(x) if field.name not in skipped]
    values = {name: getattr(x, name) for name in names}
    return ", ".join(
        f"{value}" if name == "operation" else f"{name}={value}"
        for name, value in values.items()
        if name in shown or value != getattr(plain, name)
    )


# From a seed to a program.


def draw(seed: int) -> RandomProgram:
    """The program of a seed. Programs of neighbouring seeds have nothing in common."""
    r = np.random.default_rng(seed)

    def one(names: Any) -> Any:
        names = list(names)
        return names[r.integers(len(names))]

    precision = "mixed" if r.random() < 0.2 else "float64"
    has_key = r.random() < 0.3
    wrappers = [
        name for name in WRAPPERS if precision == "float64" or name not in DECIDED_BY_ACTIVATIONS
    ]

    def layer() -> Layer:
        return Layer(
            operation=one(WITH_KEY) if has_key and r.random() < 0.5 else one(WITHOUT_KEY),
            view=one(VIEWS) if r.random() < 0.8 else "plain",
            nonlinearity=one(NONLINEARITIES),
            wrapper=one(wrappers) if r.random() < 0.7 else "",
            own=bool(r.integers(2)),
            is_half=bool(r.integers(2)) and precision == "mixed",
        )

    network = Network(
        layers=tuple(layer() for _ in range(r.integers(1, 4))),
        head="squares" if r.random() < 0.4 else one(HEADS),
        regulariser=one(REGULARISERS),
        precision=precision,
    )
    asked = one(ASKED)
    size = BATCH if asked == "units" else int(r.integers(1, 6))
    weights = tuple(one([1.0, 0.0, 0.0, 2.5, 0.5, 3.0]) for _ in range(size))
    if r.random() < 0.4 or sum(weights) == 0:
        weights = None
    # In the gradient of a kernel that has no rule, XLA lets what is not finite into other examples, as
    # docs/architecture.md says. Random kernels stand in loops and branches, where some have none.
    has_kernel = any(layer.operation.startswith("convolution") for layer in network.layers)
    may_be_anything = weights is not None and 0 in weights and not has_kernel
    call = Call(
        form=one(name for name, form in FORMS.items() if has_key == any(key in form for key in KEYS)),
        asked=asked,
        size=size,
        weights=weights,
        blank=int(r.integers(size + 1)) if r.random() < 0.4 else 0,
        padding=float(one([0, np.nan, np.inf, -np.inf])) if may_be_anything else 0.0,
        keep_batch_dim=bool(r.integers(2)),
        has_aux=r.random() < 0.2,
        microbatch_size=one([None, None, 1, 2, 3, "auto"]),
        strategy=one(["auto", "auto", "auto", *(strategy.name for strategy in STRATEGIES)]),
        nonfinite="drop" if r.random() < 0.3 and (may_be_anything or weights is None) else "keep",
    )
    return RandomProgram(network, call, seed)


# From a program to an answer.


def check(program: RandomProgram) -> str:
    """Compares a program's statistics with the oracle's and returns "ok", or why there is no comparison.

    Raises an error if a statistic is wrong.
    """
    call, args = program.call, program.args()
    given = call.given_weights
    given = None if given is None else array(given, program.network.dtype)
    loss = jax.jit(program.loss)  # traced once, for the oracle and, in half of the programs, for pergrad
    weights = _kept_weights(program, loss, args)
    if not np.any(weights):
        return "not finite"
    truth, error = _truth(program, loss, args, weights)
    if not all(np.all(np.isfinite(x)) for x in jax.tree.leaves((truth.losses, truth.grads))):
        return "not finite"
    if error > ERROR["bfloat16"]:
        return "badly conditioned"
    names, whole = ASKED[call.asked]
    if call.size == 1 or np.sum(weights) <= 1:
        names = [name for name in names if name != "variance"]
    numbers = call.options["argnums"]
    if isinstance(numbers, int):
        params, paths = args[numbers], _paths(args[numbers])
    else:
        params = tuple(args[n] for n in numbers)
        paths = [f"args[{n}]{path}" for n in numbers for path in _paths(args[n])]
    questions = Questions(truth, paths)
    known = STATISTICS | {name: unit.statistic for name, unit in UNITS.items()}
    fun, leaf, some = program.loss if call.keep_batch_dim else loss, program.seed % len(paths), {}
    if call.asked == "positions":
        some = of_positions(fun, args, paths[leaf], call.options)
    stats_fn = pg.value_and_stats(
        fun,
        (
            {name: known[name] for name in names},
            {name: questions.statistics[name] for name in whole},
            some,
        ),
        **call.options,
        microbatch_size=call.microbatch_size,
        strategy=call.strategy,
        nonfinite=call.nonfinite,
    )
    keywords = questions.keywords(whole, params, (0, SEVERAL)[program.seed % 2])
    value, (stats, of_whole, parts) = jax.jit(stats_fn)(*args, example_weights=given, **keywords)
    assert_agrees((value, stats), truth, weights, error)
    if parts:
        questions.assert_positions_agree(parts, leaf, keywords["direction"], weights, error)
    questions.assert_agrees(of_whole, keywords, weights, error)
    return "ok"


def _kept_weights(program: RandomProgram, loss: Callable[..., Any], args: tuple[Any, ...]) -> np.ndarray:
    """How often each example counts, which is 0 for one that is dropped."""
    call = program.call
    given = np.ones(call.size) if call.weights is None else np.asarray(call.given_weights)
    if call.nonfinite == "keep":
        return given
    values, _, grads = oracle.per_example(loss, args, **call.options)
    leaves = (values, *jax.tree.leaves(grads))
    finite = [np.isfinite(x).reshape(call.size, -1).all(axis=1) for x in leaves]
    return np.where(np.all(finite, axis=0), given, 0)


def _paths(params: Tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _truth(
    program: RandomProgram, loss: Callable[..., Any], args: tuple[Any, ...], counts: np.ndarray
) -> tuple[Truth, float]:
    """The truth in float64, zero for examples of weight 0, and the error that a gradient may have.

    In mixed precision the model's own roundings count, which no strategy can undo. The oracle's
    gradients in that precision show how large they are. The error is a few times as large, because
    another order of additions rounds otherwise.
    """
    call = program.call

    def kept(x: np.ndarray) -> np.ndarray:
        return np.stack([np.where(count > 0, y, 0) for y, count in zip(x, counts, strict=True)])

    def of(loss: Callable[..., Any], args: tuple[Any, ...]) -> Truth:
        return Truth(*jax.tree.map(kept, oracle.per_example(loss, args, **call.options)))

    if program.network.precision == "float64":
        return of(loss, args), ERROR["float64"]
    exact = replace(program, network=replace(program.network, precision="float64"))
    truth, rounded = of(exact.loss, jax.tree.map(_widen, args)), of(loss, args)
    pairs = zip(
        jax.tree.leaves(truth.grads), jax.tree.leaves(rounded.grads), scales(truth, counts), strict=True
    )
    errors = [np.max(np.abs(a - b)) / G for a, b, G in pairs if G > 0]
    is_half = any(layer.is_half for layer in program.network.layers)
    return truth, max(ERROR["bfloat16" if is_half else "float32"], 8 * max(errors, default=0))


def _widen(x: Any) -> Any:
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


# From a wrong program to a simpler one.


def simpler(program: RandomProgram) -> Iterator[RandomProgram]:
    """Programs that differ in one place, where they are simpler."""
    network, call = program.network, program.call
    for i, layer in enumerate(network.layers):
        before, after = network.layers[:i], network.layers[i + 1 :]
        if len(network.layers) > 1:
            yield replace(program, network=replace(network, layers=before + after))
        for plain in _plainer(layer, Layer()):
            yield replace(program, network=replace(network, layers=(*before, plain, *after)))
    for plain in _plainer(network, Network(network.layers)):
        yield replace(program, network=plain)
    for plain in _plainer(call, Call()):
        yield replace(program, call=plain)


def _plainer(x: Any, plain: Any) -> Iterator[Any]:
    for field in fields(x):
        value = getattr(plain, field.name)
        if getattr(x, field.name) != value and not (field.name == "size" and x.weights):
            yield replace(x, **{field.name: value})


def reduced(program: RandomProgram, is_wrong: Callable[[RandomProgram], bool]) -> RandomProgram:
    """The simplest program that is found to be wrong still, one simplification after the other."""
    for candidate in simpler(program):
        if is_wrong(candidate):
            return reduced(candidate, is_wrong)
    return program
