"""Training with differential privacy: clipped gradients, noise, and what they cost in accuracy.

    python -m examples.private_digits

Each step draws every example with the same probability q, on its own (Poisson sampling), clips the
gradient g_i of each drawn example to the norm C, and adds noise to their sum:

    update = (sum_i g_i min(1, C / ||g_i||) + z) / (q N),    z normal, with deviation sigma C

`pg.ClippedMean` is a mean over the examples that were drawn, so the sum is that times `pg.Count`. The
divisor is the *expected* number of examples, q N: how many were drawn depends on who is in the data, and
so would a step that was divided by it. One example more or less changes the sum by at most C, and the
noise is sigma times that; the accountant needs q, sigma and the number of steps, and nothing else.

Draws differ in size and compiled programs do not, so a draw is padded to a fixed capacity with examples
of weight 0. One larger than the capacity would be cut, which the accountant does not know about; the
capacity is chosen so that this has a probability far below delta, and the probability is printed.

What this does not do, and a release would need:
- Sums, norms and noise are in float32. The theory is about real numbers: rounding can take a clipped
  norm a little over C, and the last bits of a float can tell apart what the noise should hide.
- The seeds are in this file, and JAX's and NumPy's generators are not made to resist an attacker. Who
  knows the noise can subtract it.
- The settings were chosen by looking at accuracies on this very data, and N is taken to be public.
  Neither is paid for in epsilon.
- Only the parameters are private. The accuracy on the training set and the share of clipped gradients
  are exact, and printed for you to learn from; they are not for publication.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import pld
from scipy.stats import binom

import pergrad as pg
from examples import digits
from pergrad.lab.timing import table

DELTA = 1e-5
SEEDS = 5


@dataclasses.dataclass(frozen=True)
class Settings:
    epochs: int = 20
    steps_per_epoch: int = 6  # the reciprocal of q: an epoch draws each example once, on average
    capacity: int = 384  # of 1500 examples 250 are expected; the deviation is 14
    max_norm: float = 1.0  # C
    noise_multiplier: float = 2.5  # sigma
    learning_rate: float = 0.5

    @property
    def rate(self) -> float:
        """q: the probability that a step draws a given example."""
        return 1 / self.steps_per_epoch

    @property
    def noise_deviation(self) -> float:
        """sigma C; without noise it is 0, also where C is infinite."""
        return self.noise_multiplier * self.max_norm if self.noise_multiplier else 0.0

    def without_privacy(self) -> "Settings":
        """The same training, with the gradients as they are."""
        return dataclasses.replace(self, max_norm=math.inf, noise_multiplier=0.0)


class Epoch(NamedTuple):
    """How training went, after an epoch."""

    train_accuracy: float
    test_accuracy: float
    clipped: float  # the fraction of the drawn examples whose gradient was clipped


def draw(rng: np.random.Generator, examples: int, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """A Poisson sample: indices, padded to the capacity, and their weights, 1 or 0 for padding."""
    drawn = np.flatnonzero(rng.random(examples) < settings.rate)
    drawn = rng.permutation(drawn)[: settings.capacity]
    padding = settings.capacity - len(drawn)
    weights = np.repeat(np.float32([1, 0]), [len(drawn), padding])
    return np.pad(drawn, (0, padding)), weights


def clipped_sum(max_norm: float) -> Callable[..., tuple[Any, jax.Array]]:
    """A function of parameters, examples and weights: the sum of clipped gradients, and the norms."""
    statistics = {"mean": pg.ClippedMean(max_norm), "norm": pg.Norm(), "count": pg.Count()}
    stats_fn = pg.grad_stats(digits.loss, statistics)

    @jax.jit
    def sum_and_norms(params, batch, weights):
        stats = stats_fn(params, batch, example_weights=weights)
        count = stats["count"]
        # A mean of nothing is NaN; a sum of nothing is 0, and the step is noise alone.
        total = jax.tree.map(lambda mean: jnp.where(count > 0, count * mean, 0), stats["mean"])
        return total, stats["norm"]

    return sum_and_norms


def gaussian_noise(key: jax.Array, params: Any, deviation: float) -> Any:
    """Noise like the parameters. It knows their shapes, and nothing of the examples."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten(
        [deviation * jax.random.normal(k, p.shape, p.dtype) for k, p in zip(keys, leaves, strict=True)]
    )


def privatised_sum(settings: Settings) -> Callable[..., tuple[Any, jax.Array]]:
    """As `clipped_sum`, with noise that a key decides on."""
    sum_and_norms = clipped_sum(settings.max_norm)

    @jax.jit
    def noisy_sum_and_norms(params, batch, weights, key):
        total, norms = sum_and_norms(params, batch, weights)
        noise = gaussian_noise(key, params, settings.noise_deviation)
        return jax.tree.map(jnp.add, total, noise), norms

    return noisy_sum_and_norms


def epsilons(settings: Settings) -> list[float]:
    """Epsilon after each epoch, an upper bound, for data that differ by one example more or less.

    It is the same whatever the data.
    """
    sampled = dp_accounting.PoissonSampledDpEvent(
        settings.rate, dp_accounting.GaussianDpEvent(settings.noise_multiplier)
    )
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    after_epoch = []
    for _ in range(settings.epochs):
        accountant.compose(sampled, settings.steps_per_epoch)
        after_epoch.append(accountant.get_epsilon(DELTA))
    return after_epoch


@functools.cache
def make_step(settings: Settings, examples: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The start of the optimizer's state, and one step of training on `examples` examples."""
    optimizer = optax.sgd(settings.learning_rate, momentum=0.9)
    noisy_sum_and_norms = privatised_sum(settings)
    expected = settings.rate * examples

    @jax.jit
    def step(params, state, batch, weights, key):
        total, norms = noisy_sum_and_norms(params, batch, weights, key)
        gradient = jax.tree.map(lambda leaf: leaf / expected, total)
        updates, state = optimizer.update(gradient, state, params)
        clipped = jnp.sum(weights * (norms > settings.max_norm))
        return optax.apply_updates(params, updates), state, clipped

    return optimizer.init, step


def train(settings: Settings, data: digits.Digits, seed: int) -> tuple[digits.Params, list[Epoch]]:
    images, labels = data.train
    init_state, step = make_step(settings, len(labels))
    init_key, noise_key = jax.random.split(jax.random.key(seed))
    params = digits.init(init_key)
    state = init_state(params)
    rng = np.random.default_rng(seed)
    history = []
    for _ in range(settings.epochs):
        drawn = clipped = 0.0
        for _ in range(settings.steps_per_epoch):
            indices, weights = draw(rng, len(labels), settings)
            noise_key, key = jax.random.split(noise_key)
            batch = images[indices], labels[indices]
            params, state, clipped_now = step(params, state, batch, weights, key)
            drawn, clipped = drawn + weights.sum(), clipped + clipped_now
        accuracies = (float(digits.accuracy(params, part)) for part in data)
        history.append(Epoch(*accuracies, clipped=float(clipped / max(drawn, 1))))
    return params, history


def overflow_probability(settings: Settings, examples: int) -> float:
    """How likely it is that any draw of the training is larger than the capacity, at most."""
    steps = settings.epochs * settings.steps_per_epoch
    return steps * float(binom.sf(settings.capacity, examples, settings.rate))


def largest_change(settings: Settings, params: Any, batch: digits.Batch) -> float:
    """How far the clipped sum moves, at most, when one of the examples is left out."""
    sum_and_norms = clipped_sum(settings.max_norm)
    everyone = jnp.ones(len(batch[1]))
    whole, _ = sum_and_norms(params, batch, everyone)

    def change(one_out):
        rest, _ = sum_and_norms(params, batch, everyone - one_out)
        return optax.tree.norm(jax.tree.map(jnp.subtract, whole, rest))

    return float(jnp.max(jax.jit(jax.vmap(change))(jnp.eye(len(everyone)))))


def noises(settings: Settings, params: Any, batch: digits.Batch) -> list[Any]:
    """What one key adds to the sum: with every example, without the first half, and with none."""
    key = jax.random.key(0)
    sum_and_norms, noisy_sum_and_norms = clipped_sum(settings.max_norm), privatised_sum(settings)
    found = []
    for kept in (1.0, np.arange(len(batch[1])) >= len(batch[1]) // 2, 0.0):
        weights = jnp.ones(len(batch[1])) * kept
        total, _ = sum_and_norms(params, batch, weights)
        noisy, _ = noisy_sum_and_norms(params, batch, weights, key)
        found.append(jax.tree.map(jnp.subtract, noisy, total))
    return found


def largest_difference(trees: list[Any]) -> float:
    """The largest difference of an entry from that of the last tree."""
    *others, last = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(t)]) for t in trees)
    return max(float(np.max(np.abs(other - last))) for other in others)


def history_table(epsilon: list[float], private: list[Epoch], plain: list[Epoch]) -> str:
    header = ["epoch", "epsilon", "train", "test", "clipped", "not private: train", "test"]
    rows = []
    for i, (spent, line, other) in enumerate(zip(epsilon, private, plain, strict=True), start=1):
        accuracies = (*line, other.train_accuracy, other.test_accuracy)
        rows.append([str(i), f"{spent:.2f}", *(f"{part:.1%}" for part in accuracies)])
    return table(header, rows)


def main() -> None:
    settings = Settings()
    plain = settings.without_privacy()
    data = [digits.load(np.random.default_rng(seed)) for seed in range(SEEDS)]
    examples = len(data[0].train[1])
    print(f"{examples} digits to train on, {len(data[0].held_out[1])} to test on.")
    print(settings)
    print(
        f"Expected in a batch: {settings.rate * examples:.0f}. Probability that one of the batches is "
        f"larger than {settings.capacity}: {overflow_probability(settings, examples):.0e}."
    )

    private_runs = [train(settings, data[seed], seed) for seed in range(SEEDS)]
    plain_runs = [train(plain, data[seed], seed) for seed in range(SEEDS)]
    print(f"\nEpsilon at delta = {DELTA:g}, accuracies, and the share of gradients that were clipped:\n")
    print(history_table(epsilons(settings), private_runs[0][1], plain_runs[0][1]))
    print(f"\nThat was one seed. Final accuracy on the test set over {SEEDS}, mean (lowest to highest):")
    for name, runs in (("private", private_runs), ("not private", plain_runs)):
        final = [history[-1].test_accuracy for _, history in runs]
        print(f"  {name:12} {np.mean(final):.1%} ({min(final):.1%} to {max(final):.1%})")

    params = private_runs[0][0]
    images, labels = data[0].train
    batch = images[:64], labels[:64]
    change = largest_change(settings, params, batch)
    difference = largest_difference(noises(settings, params, batch))
    print(
        "\nWhat the guarantee stands on, measured on 64 examples:\n"
        f"  Leaving out one of them moves the clipped sum by at most {change:.6f}. The bound is "
        f"{settings.max_norm:g}, up to rounding.\n"
        "  The noise that one key adds to the sum of all of them, of half of them and of none is the "
        f"same up to\n  {difference:.0e}, which is rounding. Its deviation is "
        f"{settings.noise_deviation:g}, whatever the data."
    )


if __name__ == "__main__":
    main()
