"""A network that reads gradients: the diagonal of the Fisher matrix, from eight examples.

    python -m examples.fisher_from_few

The diagonal of the Fisher matrix is the mean of g^2 over examples whose labels the model itself draws. A
few examples estimate it badly, `Mean(square)` of eight of them above all. A network that has seen other
models' gradients can do better, since it knows what such diagonals look like. This is a small version of
the idea of GradMetaNet (Gelberg et al. 2025, arXiv 2507.01649).

An example's gradient of a dense layer is the outer product of its input x_i and its residual d_i, which
`pg.Factors` returns: 64 + 10 numbers in place of 640. So the network reads sets of factors, [examples,
neurons], and it does not care how the examples or the neurons are ordered: each layer mixes an entry
with the means over the examples and over the neurons. Its output is a vector for each input neuron and
for each output neuron. A product of the two corrects a first guess, which is a mix of

    mean_i x_ij^2 d_ik^2                what Mean(square) of these examples is
    mean_i x_ij^2 * mean_i d_ik^2       what K-FAC's diagonal is: inputs and residuals are independent.

The networks that it learns from and those that it is tested on read scikit-learn's digits. They have
different seeds, and are 0 to 200 steps old. The truth is exact for the 1500 training images: each counts
once for every class, with the model's probability of the class as its weight. The error is that of the
roots, which preconditioners divide by: |root - truth| / |truth|, over all entries of a layer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pergrad as pg
from examples import digits
from pergrad.lab.timing import table

FEW = 8
MORE = (16, 32, 64)  # for comparison: Mean(square) of so many
AGES = (0, 20, 60, 200)  # steps of training
TRAINING, TESTING = 48, 16  # networks
FEATURES = 24
STEPS = 1500
DRAWS = 4  # sets of examples for every network of the test
LAYERS = ("hidden", "out")

Tree = Any
Factors = tuple[jax.Array, jax.Array]  # inputs [examples, n] and residuals [examples, m]


# The networks that are looked at, and their gradients.


@functools.partial(jax.jit, static_argnames="steps")
def trained(key: jax.Array, images: jax.Array, labels: jax.Array, steps: int) -> Tree:
    tx = optax.adam(3e-3)

    def step(carry: Tree, key: jax.Array) -> tuple[Tree, None]:
        params, state = carry
        rows = jax.random.randint(key, (60,), 0, len(labels))
        updates, state = tx.update(
            jax.grad(digits.loss)(params, (images[rows], labels[rows])), state, params
        )
        return (optax.apply_updates(params, updates), state), None

    params = digits.init(key)
    keys = jax.random.split(jax.random.fold_in(key, 1), steps)
    return jax.lax.scan(step, (params, tx.init(params)), keys)[0][0]


def weights(params: Tree) -> Tree:
    """The matrices of the layers, of which the diagonal is asked for."""
    return {layer: params[layer]["w"] for layer in LAYERS}


@jax.jit
def true_diagonal(params: Tree, images: jax.Array) -> Tree:
    """Mean of g^2 over all images and all labels, each with the probability that the model gives it."""
    probabilities = jax.nn.softmax(digits.logits(params, images))
    labels = jnp.tile(jnp.arange(digits.CLASSES), len(images))
    every = jnp.repeat(images, digits.CLASSES, axis=0), labels
    stats_fn = pg.grad_stats(digits.loss, pg.Mean(jnp.square), microbatch_size=1000)
    return weights(stats_fn(params, every, example_weights=probabilities.ravel()))


def draw(params: Tree, images: jax.Array, key: jax.Array, count: int) -> Tree:
    """Some images, with labels that the model draws."""
    rows, labels = jax.random.split(key)
    chosen = images[jax.random.choice(rows, len(images), (count,), replace=False)]
    return chosen, jax.random.categorical(labels, digits.logits(params, chosen))


def few_squares(params: Tree, batch: Tree) -> Tree:
    return weights(pg.grad_stats(digits.loss, pg.Mean(jnp.square))(params, batch))


def factors(params: Tree, batch: Tree) -> dict[str, Factors]:
    pairs = weights(pg.grad_stats(digits.loss, pg.Factors())(params, batch))
    return {name: (pair.inputs[:, 0], pair.residuals[:, 0]) for name, pair in pairs.items()}


# The network that reads them.


def init(key: jax.Array) -> Tree:
    def matrix(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[0] ** 0.5

    def side(key: jax.Array) -> Tree:
        first, *rest = jax.random.split(key, 7)
        blocks = [
            {
                name: matrix(k, FEATURES, FEATURES)
                for name, k in zip(("own", "examples", "neurons"), keys, strict=True)
            }
            | {"bias": jnp.zeros(FEATURES)}
            for keys in (rest[:3], rest[3:])
        ]
        return {"first": matrix(first, 5, FEATURES), "blocks": blocks, "alone": jnp.zeros(FEATURES)}

    inputs, residuals, left = jax.random.split(key, 3)
    return {
        "inputs": side(inputs),
        "residuals": side(residuals),
        "left": matrix(left, FEATURES, FEATURES),
        "right": jnp.zeros((FEATURES, FEATURES)),  # so that the first guess is what it starts with
        "mix": jnp.zeros(()),
        "floor": jnp.full((), -6.0),
    }


def read(net: Tree, x: jax.Array, context: jax.Array) -> jax.Array:
    """A vector for each neuron, [n, FEATURES], from its numbers x [examples, n] in all examples."""
    here = jnp.broadcast_to(context[:, None], (*x.shape, 2))
    z = jnp.stack([x, jnp.abs(x), jnp.square(x)], axis=-1)
    z = jax.nn.gelu(jnp.concatenate([z, here], axis=-1) @ net["first"])
    for block in net["blocks"]:
        mixed = z @ block["own"] + block["bias"]
        mixed += jnp.mean(z, axis=0, keepdims=True) @ block["examples"]
        mixed += jnp.mean(z, axis=1, keepdims=True) @ block["neurons"]
        z = z + jax.nn.gelu(mixed)
    return jnp.mean(z, axis=0)


def guesses(x: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two guesses: of the examples' squares, and of independent inputs and residuals; [n, m]."""
    x2, d2 = jnp.square(x), jnp.square(d)
    return x2.T @ d2 / len(x), jnp.outer(jnp.mean(x2, axis=0), jnp.mean(d2, axis=0))


def predicted_root(net: Tree, pair: Factors) -> jax.Array:
    """The root of the diagonal, [n, m]. If all factors are scaled, so is the result."""
    scales = [jnp.sqrt(jnp.mean(jnp.square(side))) for side in pair]
    x, d = (side / scale for side, scale in zip(pair, scales, strict=True))
    context = jnp.stack([jnp.mean(jnp.square(x), axis=1), jnp.mean(jnp.square(d), axis=1)], axis=-1)
    squares, independent = guesses(x, d)
    mix = jax.nn.sigmoid(net["mix"])
    guess = mix * squares + (1 - mix) * independent + jnp.exp(net["floor"])
    u, v = read(net["inputs"], x, context), read(net["residuals"], d, context)
    correction = (u @ net["left"]) @ (v @ net["right"]).T / FEATURES
    correction += (u @ net["inputs"]["alone"])[:, None] + (v @ net["residuals"]["alone"])[None]
    return scales[0] * scales[1] * jnp.sqrt(guess) * jnp.exp(correction)


def error(root: jax.Array, diagonal: jax.Array) -> jax.Array:
    truth = jnp.sqrt(diagonal)
    return jnp.linalg.norm(root - truth) / jnp.linalg.norm(truth)


@jax.jit
def learn(key: jax.Array, models: Tree, diagonals: Tree, images: jax.Array) -> tuple[Tree, jax.Array]:
    """Learns from the models, stacked along a first axis; the network and the errors of all steps."""
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))

    def objective(net: Tree, key: jax.Array) -> jax.Array:
        which, examples = jax.random.split(key)
        number = jax.random.randint(which, (), 0, TRAINING)
        model, diagonal = jax.tree.map(lambda x: x[number], (models, diagonals))
        pairs = factors(model, draw(model, images, examples, FEW))
        return jnp.mean(jnp.stack([error(predicted_root(net, pairs[k]), diagonal[k]) for k in LAYERS]))

    def step(carry: Tree, key: jax.Array) -> tuple[Tree, jax.Array]:
        net, state = carry
        many = jax.vmap(lambda key: jax.value_and_grad(objective)(net, key))(jax.random.split(key, 4))
        value, gradient = jax.tree.map(lambda x: jnp.mean(x, axis=0), many)
        updates, state = tx.update(gradient, state, net)
        return (optax.apply_updates(net, updates), state), value

    start, steps = jax.random.split(key)
    net = init(start)
    (net, _), errors = jax.lax.scan(step, (net, tx.init(net)), jax.random.split(steps, STEPS))
    return net, errors


@jax.jit
def compare(net: Tree, model: Tree, diagonal: Tree, images: jax.Array, key: jax.Array) -> Tree:
    """The errors of all estimates for one model and one draw of examples, by estimate and layer."""
    keys = jax.random.split(key, 1 + len(MORE))
    batch = draw(model, images, keys[0], FEW)
    pairs = factors(model, batch)
    roots = {
        f"Mean(square) of {FEW}": jax.tree.map(jnp.sqrt, few_squares(model, batch)),
        f"independent, of {FEW}": {k: jnp.sqrt(guesses(*pairs[k])[1]) for k in LAYERS},
        f"network, of {FEW}": {k: predicted_root(net, pairs[k]) for k in LAYERS},
    }
    for key, count in zip(keys[1:], MORE, strict=True):
        many = draw(model, images, key, count)
        roots[f"Mean(square) of {count}"] = jax.tree.map(jnp.sqrt, few_squares(model, many))
    return {name: {k: error(root[k], diagonal[k]) for k in LAYERS} for name, root in roots.items()}


def models_from(seeds: range, data: digits.Digits) -> list[Tree]:
    ages = [AGES[seed % len(AGES)] for seed in seeds]
    return [
        trained(jax.random.key(seed), *data.train, age) for seed, age in zip(seeds, ages, strict=True)
    ]


def run(seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """The errors of all estimates, by estimate and layer, for all networks of the test and all draws."""
    data = digits.load(np.random.default_rng(0))
    data = digits.Digits(*jax.tree.map(jnp.asarray, data))
    images = data.train[0]
    models = models_from(range(TRAINING), data)
    diagonals = [true_diagonal(model, images) for model in models]
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    net, _ = learn(jax.random.key(seed), stack(models), stack(diagonals), images)

    found = []
    for number, model in enumerate(models_from(range(TRAINING, TRAINING + TESTING), data)):
        diagonal = true_diagonal(model, images)
        for chosen in range(DRAWS):
            key = jax.random.fold_in(jax.random.key(number + 10_000), chosen)
            found.append(compare(net, model, diagonal, images, key))
    return jax.tree.map(lambda *errors: np.stack(errors), *found)


def main() -> None:
    found = dict(sorted(run().items(), key=lambda item: -np.mean(item[1]["hidden"])))
    rows = [
        [
            name,
            *(
                f"{np.mean(by_layer[k]):.2f} ± {np.std(by_layer[k]) / len(by_layer[k]) ** 0.5:.3f}"
                for k in LAYERS
            ),
        ]
        for name, by_layer in found.items()
    ]
    print(
        "Relative error of the root of the Fisher matrix's diagonal, as means over "
        f"{TESTING} networks with {DRAWS} draws each:\n"
    )
    print(table(["estimate", "64 x 64", "64 x 10"], rows))


if __name__ == "__main__":
    main()
