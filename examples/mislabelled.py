"""Finding wrong labels by looking at each example's gradient.

    python -m examples.mislabelled [picture.png] [--seeds 5]

Gives 8% of the training digits a wrong label, trains a small network on all of them as they are, and
ranks them by how suspicious their gradients look. No score is told which labels are wrong:

- The gradient's norm, `pg.Norm`: a wrong label pulls hard on a network that has learned the others.
  The loss of the example is the same idea without a gradient, and the one to beat.
- Whether it points away from where trusted examples point, `pg.Dot`: its inner product with the mean
  gradient of the held-out digits, whose labels are right. In that mean the classes nearly cancel, and
  it is the weakest score. The other one is the cosine with the mean of the class that the label claims:
  ten directions, one for each class, which takes a `vmap` over `direction`.
- Whether it points away from the others with the same label, `pg.Gram`: the mean of its cosines with
  them, for the gradient of the last layer. This takes no trusted examples at all.

All scores come from one call on the whole training set. They have to: a Gram matrix is [B, B], and one
per batch would know nothing of the pairs across batches. `microbatch_size` says how many examples are in
the model at a time; the result is the same. Of each example, only what the last layer saved is kept.

Each row of the table is a mean over seeds, with the lowest in brackets; a seed decides on the split, the
wrong labels, the network and the order of training. The table has the scores before training, too. There
norms and losses say nothing, and directions by class already find more than half, on average. After
training, the loss is as good as any of them: on digits this easy, what is not understood is wrong.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score

import pergrad as pg
from examples import digits
from pergrad.lab.timing import table

FRACTION = 0.08  # of the training labels are made wrong
EPOCHS = 10
BATCH = 60
LEARNING_RATE = 3e-3
SHOWN = 20  # images in the picture

LOSS = "loss"
NORM = "norm"
TRUSTED = "away from trusted"
TRUSTED_CLASS = "away from trusted class"
OWN_CLASS = "away from own class"

Scores = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """Digits of which some have a wrong label: `given` [B] are the labels to train on."""

    data: digits.Digits
    given: np.ndarray

    @property
    def is_wrong(self) -> np.ndarray:
        return self.given != self.data.train[1]

    @property
    def batch(self) -> digits.Batch:
        return self.data.train[0], self.given


@dataclasses.dataclass(frozen=True)
class Finding:
    """The scores of a task's training examples, before and after training; high is suspicious."""

    task: Task
    untrained: Scores
    trained: Scores


def make_task(rng: np.random.Generator) -> Task:
    """Digits, of which `FRACTION` of the training labels are moved to another class, each as likely."""
    data = digits.load(rng)
    given = data.train[1].copy()
    wrong = rng.choice(len(given), size=round(FRACTION * len(given)), replace=False)
    given[wrong] = (given[wrong] + rng.integers(1, digits.CLASSES, size=len(wrong))) % digits.CLASSES
    return Task(data, given)


OPTIMIZER = optax.adam(LEARNING_RATE)


@jax.jit
def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    updates, state = OPTIMIZER.update(jax.grad(digits.loss)(params, batch), state, params)
    return optax.apply_updates(params, updates), state


def train(params: Any, batch: digits.Batch, epochs: int, rng: np.random.Generator) -> Any:
    images, labels = batch
    state = OPTIMIZER.init(params)
    for _ in range(epochs):
        for indices in rng.permutation(len(labels)).reshape(-1, BATCH):
            params, state = step(params, state, (images[indices], labels[indices]))
    return params


def is_last_layer(path: str) -> bool:
    return path.startswith("['out']")


mean_fn = pg.grad_stats(digits.loss, pg.Mean())
stats_fn = pg.grad_stats(
    digits.loss,
    {"loss": pg.Loss(), "norm": pg.Norm(), "dot": pg.Dot(), "gram": pg.Gram(where=is_last_layer)},
    microbatch_size=128,
)


@jax.jit
def gradient_statistics(params: Any, batch: Any, trusted: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    """The statistics of the examples of `batch`, and the norms of the directions.

    The directions are the mean gradients of the trusted examples of each class, and of all: "dot" is
    [11, B]. The others do not depend on the direction, and have no axis for it.
    """
    of_class = jax.nn.one_hot(trusted[1], digits.CLASSES, axis=0)
    weights = jnp.concatenate([of_class, jnp.ones_like(of_class[:1])])
    directions = jax.vmap(lambda w: mean_fn(params, trusted, example_weights=w))(weights)

    stats = jax.vmap(
        lambda direction: stats_fn(params, batch, direction=direction),
        out_axes={"loss": None, "norm": None, "dot": 0, "gram": None},
    )(directions)
    return stats, jax.vmap(optax.tree.norm)(directions)


def score(params: Any, batch: digits.Batch, trusted: digits.Batch) -> Scores:
    """How suspicious each example is, in five ways; [B] each."""
    stats, lengths = jax.tree.map(np.asarray, gradient_statistics(params, batch, trusted))
    labels = batch[1]
    examples = np.arange(len(labels))

    last_norm = np.sqrt(np.diagonal(stats["gram"]))
    cosines = stats["gram"] / np.maximum(np.outer(last_norm, last_norm), 1e-30)
    others = (labels[:, None] == labels) & (examples[:, None] != examples)
    dots_with_class = stats["dot"][labels, examples]
    return {
        LOSS: stats["loss"],
        NORM: stats["norm"],
        TRUSTED: -stats["dot"][-1],
        TRUSTED_CLASS: -dots_with_class / np.maximum(stats["norm"] * lengths[labels], 1e-30),
        OWN_CLASS: -np.sum(cosines, axis=1, where=others) / np.sum(others, axis=1),
    }


def run(seed: int, epochs: int = EPOCHS) -> Finding:
    rng = np.random.default_rng(seed)
    task = make_task(rng)
    params = digits.init(jax.random.key(seed))
    untrained = score(params, task.batch, task.data.held_out)
    params = train(params, task.batch, epochs, rng)
    return Finding(task, untrained, score(params, task.batch, task.data.held_out))


def found(scores: np.ndarray, is_wrong: np.ndarray) -> float:
    """The fraction of wrong labels among the k most suspicious, where k is how many are wrong."""
    k = np.sum(is_wrong)
    return float(np.mean(is_wrong[np.argsort(-scores)[:k]]))


def result_table(findings: Sequence[Finding]) -> str:
    header = ["score", "untrained: found", "AUC", "trained: found", "AUC"]
    rows = []
    for name in findings[0].trained:
        row = [name]
        for moment in ("untrained", "trained"):
            for measure, digits_shown in ((found, 2), (_auc, 3)):
                values = [measure(getattr(f, moment)[name], f.task.is_wrong) for f in findings]
                row.append(f"{np.mean(values):.{digits_shown}f} ({min(values):.{digits_shown}f})")
        rows.append(row)
    return table(header, rows)


def _auc(scores: np.ndarray, is_wrong: np.ndarray) -> float:
    return float(roc_auc_score(is_wrong, scores))


def draw(finding: Finding, path: str) -> None:
    """Scores of right and wrong labels, precision against rank, and the most suspicious images."""
    task, scores = finding.task, finding.trained
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[5, 4])

    *histograms, precision = upper.subplots(1, 4)
    for axes, name in zip(histograms, (NORM, TRUSTED_CLASS, OWN_CLASS), strict=True):
        bins = np.histogram_bin_edges(scores[name], 30)
        for label, mask in (("right label", ~task.is_wrong), ("wrong label", task.is_wrong)):
            axes.hist(scores[name][mask], bins, alpha=0.6, density=True, label=label)
        axes.set(title=name, xlabel="score", yticks=[])
    histograms[0].legend()

    k = np.sum(task.is_wrong)
    ranks = np.arange(1, 2 * k + 1)
    for name in scores:
        hits = task.is_wrong[np.argsort(-scores[name])[: 2 * k]]
        precision.plot(ranks, np.cumsum(hits) / ranks, label=name)
    precision.axvline(k, color="grey", linestyle=":")
    precision.set(title=f"precision ({k} labels are wrong)", xlabel="rank", ylim=(0, 1.02))
    precision.legend(fontsize="x-small")

    lower.suptitle(f"The {SHOWN} most suspicious by '{OWN_CLASS}': label given / true")
    worst = np.argsort(-scores[OWN_CLASS])[:SHOWN]
    for axes, i in zip(lower.subplots(2, SHOWN // 2).flat, worst, strict=True):
        axes.imshow(task.data.train[0][i].reshape(8, 8), cmap="gray_r")
        color = "tab:red" if task.is_wrong[i] else "black"
        axes.set_title(f"{task.given[i]} / {task.data.train[1][i]}", color=color)
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find wrong labels by per-example gradients.")
    parser.add_argument("picture", nargs="?", default="mislabelled.png", help="where to save it")
    parser.add_argument("--seeds", type=int, default=5, help="over how many to average")
    options = parser.parse_args(arguments)

    findings = [run(seed) for seed in range(options.seeds)]
    task = findings[0].task
    print(f"{np.sum(task.is_wrong)} of {len(task.given)} labels are wrong. How each score finds them:\n")
    print(result_table(findings))
    print(
        f"\nMeans over {options.seeds} seeds, the lowest in brackets. Found: how many of the k most "
        "suspicious are wrong,\nfor k wrong labels; by chance it would be "
        f"{FRACTION:.2f}, and the area under the ROC curve (AUC) 0.5."
    )
    draw(findings[0], options.picture)
    print(f"A picture of the first seed: {options.picture}")


if __name__ == "__main__":
    main()
