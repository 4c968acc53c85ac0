r"""Random calls with sharded parameters on eight devices, beside a loop of `jax.grad`.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m tests.support.sharded_programs --first-seed 0 --programs 100

A call is drawn from its seed alone. The oracle knows no mesh and nothing of the library. It has a copy
of every weight for each of its uses, at each position, so that `jax.grad` of one example returns every
single contribution to a gradient. Sums of contributions are gradients, and their squares and variances
are those of `per="token"`.
"""

import argparse
import dataclasses
import random
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pergrad as pg
from pergrad._ir import backend, shards
from pergrad._strategies import streamed
from tests.support import (
    oracle,
    strict,  # noqa: F401 (it sets JAX up)
)

LAYERS, WIDTH, HIDDEN, POSITIONS, WORDS = 2, 8, 16, 3, 16

# How the layers are run. In the last two all layers have the same weights.
FORMS = ("unrolled", "unrolled remat", "scan", "scan remat", "tied", "tied scan")
MESHES = (
    {"data": 8},
    {"data": 2},
    {"pod": 2, "data": 4},
    {"data": 4, "model": 2},
    {"pod": 2, "data": 2, "model": 2},
)


def clip(norm):
    return jnp.minimum(1, 0.3 / norm)


STATISTICS = {
    "mean": pg.Mean(),
    "square": pg.Mean(jnp.square),
    "sign": pg.Mean(jnp.sign),
    "cos": pg.Mean(jnp.cos),
    "variance": pg.Variance(),
    "token mean": pg.Mean(per="token"),
    "token square": pg.Mean(jnp.square, per="token"),
    "token variance": pg.Variance(per="token"),
    "group mean": pg.Mean(per=2),
    "group square": pg.Mean(jnp.square, per=2),
    "group variance": pg.Variance(per=2),
    "norm": pg.Norm(),
    "norms": pg.Norm(by="leaf"),
    "clipped": pg.ClippedMean(0.3),
    "clipped square": pg.ClippedMean(0.3, phi=jnp.square),
    "dot": pg.Dot(),
    "individual": pg.Individual(),
    "gram": pg.Gram(),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A random call. `specs` has the spec of each parameter, by its name."""

    seed: int
    form: str
    mesh: dict[str, int]
    specs: dict[str, Any]
    names: tuple[str, ...]
    options: dict[str, Any]
    how: str
    weights: Any
    size: int
    blocks: str | None
    tied_head: bool

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(self).items() if k != "seed")


def shapes(form: str) -> dict[str, tuple[int, ...]]:
    stack = () if "tied" in form else (LAYERS,)
    return {
        "table": (WORDS, WIDTH),
        "w": (*stack, WIDTH, HIDDEN),
        "b": (*stack, HIDDEN),
        "g": (*stack, WIDTH),
        "v": (*stack, HIDDEN, WIDTH),
        "head": (WIDTH, WORDS),
    }


def draw(seed: int) -> Drawn:
    r = random.Random(seed)
    form, mesh = r.choice(FORMS), r.choice(MESHES)
    batch_axes = tuple(axis for axis in mesh if axis != "model")
    number = int(np.prod([mesh[axis] for axis in batch_axes]))
    specs = {name: _spec(r, shape, mesh, batch_axes) for name, shape in shapes(form).items()}
    names = tuple(name for name in STATISTICS if r.random() < 0.35) or ("variance",)
    groups = any("group" in name for name in names)
    each = r.choice([2, 4] if groups else [1, 2, 3, 4])
    if any("variance" in name for name in names):
        each = max(each, 2) if number == 2 else each
    size = each * number
    options: dict[str, Any] = {"microbatch_size": r.choice([None, None, 1, 2, 3, "auto"])}
    if r.random() < 0.3:
        options["strategy"] = r.choice(["streamed", "materialise"])
    if r.random() < 0.15 and not any("individual" in n or "gram" in n for n in names):
        options["nonfinite"] = "drop"
    weights = None
    if r.random() < 0.6:
        weights = np.array([r.choice([0, 0.5, 1, 1, 2, 3]) for _ in range(size)])
        weights[:2] += 1
    blocks = r.choice([None, None, "cpu", "tpu:v5e"])
    how = r.choice(["jit", "jit", "explicit", "eager"])
    return Drawn(seed, form, mesh, specs, names, options, how, weights, size, blocks, r.random() < 0.4)


def _spec(r: random.Random, shape: tuple[int, ...], mesh: dict[str, int], batch_axes: Any) -> Any:
    entries: list[Any] = [None] * len(shape)
    axes = list(mesh)
    r.shuffle(axes)
    if len(batch_axes) == 2 and r.random() < 0.4:
        both = batch_axes if r.random() < 0.5 else batch_axes[::-1]
        axes = [both, *(axis for axis in axes if axis not in batch_axes)]
    for axis in axes:
        number = int(np.prod([mesh[a] for a in (axis if isinstance(axis, tuple) else (axis,))]))
        places = [d for d, n in enumerate(shape) if entries[d] is None and n % number == 0]
        if places and r.random() < 0.8:
            entries[r.choice(places)] = axis
    return P(*entries)


# The model. Every weight may have an axis of positions in front: a copy for each of its uses.


def times(x, w):
    """x [B, T, D] times w [D, E], or times the weight of each position, w [T, D, E]."""
    return x @ w if w.ndim == 2 else jnp.einsum("btd,tde->bte", x, w)


def along(w):
    """A vector [D], or one for each position [T, D], as [B, T, D]."""
    return w[None, None] if w.ndim == 1 else w[None]


def block(p, x):
    scaled = x * along(p["g"])
    h = jnp.tanh(times(scaled, p["w"]) + along(p["b"]))
    mixed = jnp.cumsum(h, axis=1) / 2
    return x + times(mixed, p["v"])


def ends(x, head, batch):
    logits = times(x, head)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], axis=-1)
    return -jnp.mean(picked * batch["scale"][:, None, None])


def loss_of(drawn: Drawn):
    one = jax.checkpoint(block) if "remat" in drawn.form else block

    def loss(p, batch):
        x = p["table"][batch["i"]] + batch["x"]
        own = {name: p[name] for name in ("w", "b", "g", "v")}
        if drawn.form == "tied":
            for _ in range(LAYERS):
                x = one(own, x)
        elif drawn.form == "tied scan":
            x, _ = lax.scan(lambda x, _: (one(own, x), None), x, None, length=LAYERS)
        elif "scan" in drawn.form:
            x, _ = lax.scan(lambda x, q: (one(q, x), None), x, own)
        else:
            for k in range(LAYERS):
                x = one(jax.tree.map(lambda w, k=k: w[k], own), x)
        return ends(x, p["table"].T if drawn.tied_head else p["head"], batch)

    return loss


def copies(drawn: Drawn, p):
    """A copy of every weight for each of its uses: [layers, positions, ...]."""

    def copied(w):
        return np.broadcast_to(w, (POSITIONS, *w.shape))

    own = {name: [p[name]] * LAYERS if "tied" in drawn.form else list(p[name]) for name in "wbgv"}
    layers = {name: np.stack([copied(w) for w in ws]) for name, ws in own.items()}
    head = p["table"].T if drawn.tied_head else p["head"]
    return layers | {"table": copied(p["table"]), "head": copied(head)}


def loss_of_copies(p, batch):
    x = jnp.stack([p["table"][t][batch["i"][:, t]] for t in range(POSITIONS)], axis=1) + batch["x"]
    for k in range(LAYERS):
        x = block({name: p[name][k] for name in "wbgv"}, x)
    return ends(x, p["head"], batch)


def contributions(drawn: Drawn, p, batch):
    """The contributions of each example to each parameter's gradient, [B, M, ...]."""
    grad = jax.jit(jax.grad(loss_of_copies))
    of_uses = copies(drawn, p)
    rows = []
    for i in range(drawn.size):
        g = jax.tree.map(np.asarray, grad(of_uses, jax.tree.map(lambda x, i=i: x[i : i + 1], batch)))
        head = g.pop("head")
        table = g.pop("table")
        if drawn.tied_head:
            table, head = np.concatenate([table, head.swapaxes(1, 2)]), 0 * head[:1]
        if "tied" in drawn.form:
            g = {name: x.reshape(-1, *x.shape[2:]) for name, x in g.items()}
        elif "scan" in drawn.form:  # the gradient of a stack of layers is the sum of its positions
            g = {name: x.swapaxes(0, 1) for name, x in g.items()}
        else:  # a contribution to a layer is one to the stack, with zeros in the other layers
            g = {name: _in_stack(x) for name, x in g.items()}
        rows.append(g | {"table": table, "head": head})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _in_stack(x):
    """Contributions to single layers, [layers, positions, ...], as contributions to their stack."""
    stacks = np.zeros((*x.shape[:2], LAYERS, *x.shape[2:]))
    for k in range(LAYERS):
        stacks[k, :, k] = x[k]
    return stacks.reshape(-1, *stacks.shape[2:])


def expected(drawn: Drawn, of_tokens, direction):
    """The statistics, by NumPy in float64."""
    g = {name: x.sum(1) for name, x in of_tokens.items()}
    w = drawn.weights
    counts = np.ones(drawn.size) if w is None else w
    of_groups, group_counts = oracle.groups(g, 2, w) if drawn.size % 2 == 0 else (g, w)

    def tokens(reduce):
        def leaf(x):
            m = x.shape[1]
            return reduce((m * x).reshape(-1, *x.shape[2:]), np.repeat(counts, m) / 1.0)

        return {name: leaf(x) for name, x in of_tokens.items()}

    made = {
        "mean": lambda: oracle.mean(g, w),
        "square": lambda: oracle.mean_of(np.square, g, w),
        "sign": lambda: oracle.mean_of(np.sign, g, w),
        "cos": lambda: oracle.mean_of(np.cos, g, w),
        "variance": lambda: oracle.variance(g, w),
        "token mean": lambda: oracle.mean(g, w),
        "token square": lambda: tokens(lambda x, n: oracle.mean_of(np.square, x, n)),
        "token variance": lambda: tokens(oracle.variance),
        "group mean": lambda: oracle.mean(g, w),
        "group square": lambda: oracle.mean_of(np.square, of_groups, group_counts),
        "group variance": lambda: oracle.variance(of_groups, group_counts),
        "norm": lambda: oracle.norm(g),
        "norms": lambda: {name: oracle.norm(x) for name, x in g.items()},
        "clipped": lambda: oracle.clipped_mean(g, 0.3, w),
        "clipped square": lambda: oracle.clipped_mean(g, 0.3, w, np.square),
        "dot": lambda: oracle.dot(g, direction),
        "individual": lambda: g,
        "gram": lambda: oracle.gram(g),
    }
    return {name: made[name]() for name in drawn.names}


def check(drawn: Drawn) -> str:
    """Raises an error if a statistic is wrong. Returns what was compared."""
    rng = np.random.default_rng(drawn.seed)
    p = {k: rng.normal(size=s) / 3 for k, s in shapes(drawn.form).items()}
    direction = {k: rng.normal(size=s) for k, s in shapes(drawn.form).items()}
    batch = {
        "i": rng.integers(WORDS, size=(drawn.size, POSITIONS)),
        "x": rng.normal(size=(drawn.size, POSITIONS, WIDTH)),
        "y": rng.integers(WORDS, size=(drawn.size, POSITIONS)),
        "scale": np.exp(rng.normal(size=drawn.size)),
    }
    batch["i"][:, 2] = batch["i"][:, 0]
    truth = expected(drawn, contributions(drawn, p, batch), direction)
    stats = {name: STATISTICS[name] for name in drawn.names}
    kind = AxisType.Explicit if drawn.how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(
        tuple(drawn.mesh.values()), tuple(drawn.mesh), axis_types=(kind,) * len(drawn.mesh)
    )
    axes = tuple(axis for axis in drawn.mesh if axis != "model")
    args = (
        {k: jax.device_put(x, NamedSharding(mesh, drawn.specs[k])) for k, x in p.items()},
        jax.device_put(batch, NamedSharding(mesh, P(axes))),
    )
    more: dict[str, Any] = {"direction": direction} if "dot" in drawn.names else {}
    if drawn.weights is not None:
        more["example_weights"] = drawn.weights
    specs = drawn.specs if drawn.how == "jit" else None
    with _small_caches(drawn.blocks), jax.set_mesh(mesh):
        fun = pg.grad_stats(
            loss_of(drawn), stats, spmd_axis_name=axes, param_specs=specs, **drawn.options
        )
        found = (fun if drawn.how == "eager" else jax.jit(fun))(*args, **more)
        found = jax.tree.map(np.asarray, found)
    for name in drawn.names:
        for path, right in jax.tree_util.tree_leaves_with_path(truth[name]):
            ours = found[name]
            for key in path:
                ours = ours[key.key]
            scale = np.max(np.abs(right), initial=0)
            what = f"{name} {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(ours, right, rtol=1e-7, atol=1e-9 * scale + 1e-13, err_msg=what)
    return "ok"


SMALL = {"LARGEST": 100, "LARGEST_PIECE": 50, "LARGEST_PIECE_OF_TABLE": 50}


class _small_caches:
    """Gradients are divided into blocks of a few columns, as if the cache of the device were small.

    So are the means that devices exchange, and tables.
    """

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.old = backend.backend, streamed.LANES, [getattr(shards, name) for name in SMALL]
        if self.name is not None:
            device = dataclasses.replace(backend.BACKENDS[self.name], cache_size=400)
            backend.backend, streamed.LANES = lambda: device, 3
            for name, number in SMALL.items():
                setattr(shards, name, number)

    def __exit__(self, *_):
        backend.backend, streamed.LANES, numbers = self.old
        for name, number in zip(SMALL, numbers, strict=True):
            setattr(shards, name, number)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    wrong = 0
    for seed in range(options.first_seed, options.first_seed + options.programs):
        start, drawn = time.perf_counter(), draw(seed)
        try:
            outcome = check(drawn)
        except Exception as error:  # every kind of failure is reported
            outcome, wrong = f"{type(error).__name__}: {str(error)[:600]}", wrong + 1
        print(f"{seed}\t{outcome}\t{time.perf_counter() - start:.1f} s\t{drawn}", flush=True)
        if seed % 20 == 19:
            jax.clear_caches()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
