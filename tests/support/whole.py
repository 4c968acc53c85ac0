"""Statistics of whole gradients: what every case is asked, the truth, and the bounds.

The bounds follow from the one of `bounds`, a gradient that is off by up to ERROR * G in every entry of
a leaf. The leaf as a vector of n entries is then off by up to ERROR * S, where S = G sqrt(n), and all
leaves together by ERROR * S, where S^2 is the sum of theirs. So

    a norm, or the dot product with a direction of length 1:  ERROR * S
    the inner product of two gradients:                       2 ERROR * S^2
    a gradient clipped to the norm c:                         ERROR * G (1 + S / c)
    a gradient weighted by c / (c + its norm):                the same
    its square:                                               2 G times that
    a projection by matrices of length M:                     ERROR * M S

and a result of several leaves has a bound that looks at each of them: no large leaf hides a small one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg
from tests.support import oracle, projection
from tests.support.bounds import assert_within, kept, scales
from tests.support.cases import array
from tests.support.truth import Truth

Tree = Any

DIM, KEY = 3, 12345  # of projections
SEVERAL = 2  # directions, if there are several
# Of these a case is asked for two, others from case to case.
IN_TURNS = ("clipped_square", "clipped_by_leaf", "clipped_by_group", "weighted", "weighted_square_where")
OF_LEAVES = ("norm_by_leaf", "norm_by_leaf_where", "clipped", *IN_TURNS)
GROUPS = ("even", "odd")


@dataclass(frozen=True)
class Soft:
    """The weight c / (c + norm)."""

    c: float

    def __call__(self, norm: Any) -> Any:
        return self.c / (self.c + norm)


def of_positions(loss: Any, args: Any, path: str, options: Any) -> dict[str, pg.Statistic]:
    """Statistics of the positions of one parameter, by name; none if it is refused."""
    where: Callable[[str], bool] = lambda own: own == path  # noqa: E731
    try:
        pg.explain(loss, pg.Norm(per="token", where=where), **options)(*args)
    except pg.ArgumentError as error:
        assert "has no parts that belong to positions" in str(error)
        return {}
    return {
        "norm_token": pg.Norm(per="token", where=where),
        "dot_token": pg.Dot(per="token", where=where),
    }


class Questions:
    """The statistics that a case is asked for, by name, and their truth.

    `paths` are the names of its parameters. Half of them are selected where a predicate selects; half of
    the examples are clipped.
    """

    def __init__(self, truth: Truth, paths: Sequence[str]) -> None:
        self.truth = truth
        self.leaves, self.tree = jax.tree.flatten(truth.grads)
        shapes = [x.shape[1:] for x in self.leaves]
        self.matrices = [
            projection.matrix(path, shape, DIM, KEY) for path, shape in zip(paths, shapes, strict=True)
        ]
        selected = set(paths[::2])
        self.selected = [path in selected for path in paths]
        self.groups = [GROUPS[i % 2] for i in range(len(paths))]
        group_of = dict(zip(paths, self.groups, strict=True))
        self.max_norm = float(np.median(oracle.norm(truth.grads))) or 1.0
        of_leaves = np.concatenate([oracle.norm([x]) for x in self.leaves])
        of_leaves = of_leaves[of_leaves > 0]
        self.max_norm_of_leaf = float(np.median(of_leaves)) if of_leaves.size else 1.0
        norms = {name: oracle.norm(self._of_group(name)) for name in set(self.groups)}
        self.max_norms = {name: float(np.median(x)) or 1.0 for name, x in norms.items()}
        where: Callable[[str], bool] = lambda path: path in selected  # noqa: E731
        self.statistics = {
            "norm": pg.Norm(),
            "norm_where": pg.Norm(where=where),
            "norm_by_leaf": pg.Norm(by="leaf"),
            "norm_by_leaf_where": pg.Norm(by="leaf", where=where),
            "gram": pg.Gram(),
            "gram_where": pg.Gram(where=where),
            "dot": pg.Dot(),
            "dot_where": pg.Dot(where=where),
            "projected": pg.Project(DIM, KEY),
            "projected_where": pg.Project(DIM, KEY, where=where),
            "clipped": pg.ClippedMean(self.max_norm),
            "clipped_square": pg.ClippedMean(self.max_norm, phi=jnp.square),
            "clipped_by_leaf": pg.ClippedMean(self.max_norm_of_leaf, by="leaf"),
            "norm_by_group": pg.Norm(by=group_of.__getitem__),
            "clipped_by_group": pg.ClippedMean(by=group_of.__getitem__),
            "weighted": pg.WeightedMean(Soft(self.max_norm)),
            "weighted_square_where": pg.WeightedMean(
                Soft(self.max_norm_of_leaf), jnp.square, by="leaf", where=where
            ),
        }

    def keywords(self, names: Collection[str], like: Tree, several: int = 0) -> dict[str, Any]:
        """What a call for these statistics is given by keyword; `like` are the parameters."""
        wants_direction = any(name.startswith("dot") for name in names)
        direction = {"direction": self.direction(like, several)} if wants_direction else {}
        return direction | ({"max_norm": self.max_norms} if "clipped_by_group" in names else {})

    def _of_group(self, name: str) -> list[np.ndarray]:
        return [x for x, group in zip(self.leaves, self.groups, strict=True) if group == name]

    def direction(self, like: Tree, several: int = 0) -> Tree:
        """A direction of length 1, like the parameters `like`, or several of at most that length."""
        r = np.random.default_rng(0)
        front = (several,) if several else ()
        leaves = [r.normal(size=(*front, *jnp.shape(x))) for x in jax.tree.leaves(like)]
        length = np.sqrt(sum(np.sum(np.square(x)) for x in leaves))
        leaves = [
            array(x / length, jnp.result_type(p))
            for x, p in zip(leaves, jax.tree.leaves(like), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def assert_positions_agree(
        self, stats: Any, leaf: int, direction: Tree, weights: Any, error: float
    ) -> None:
        """Compares the parts of one leaf with the gradients, whose means they are.

        The mean of the inner products of the parts is that of the gradient, and by Jensen's inequality
        the mean of their squared norms is at least that of the gradient.
        """
        w = np.ones(len(self.truth.losses)) if weights is None else np.asarray(weights)
        g, v = self.leaves[leaf], jax.tree.leaves(direction)[leaf]
        S = scales(self.truth, w)[leaf] * np.sqrt(g[0].size)
        dots, norms = (np.asarray(stats[name], np.float64) for name in ("dot_token", "norm_token"))
        assert norms.ndim == 2 and dots.shape[:2] == norms.shape
        truth = oracle.dots(g, v) if v.ndim == g.ndim else oracle.dot(g, v)
        # The parts may be larger than their mean, and are rounded one by one.
        rounded = error * max(S, np.max(kept(norms, w), initial=0))
        parts = max(norms.shape[1], 1)  # where there is none, their sum is 0, and so is the gradient
        _assert_examples(np.sum(dots, axis=1) / parts, truth, w, rounded, "dot_token")
        squares = kept(np.sum(np.square(norms), axis=1) / parts, w)
        assert np.all(np.sqrt(squares) >= kept(oracle.norm([g]), w) - rounded), "norm_token"

    def assert_agrees(self, stats: Any, keywords: dict[str, Any], weights: Any, error: float) -> None:
        """Compares what results there are of a call with these keywords with the truth.

        An example of weight 0 may have any norm of its own.
        """
        w = np.ones(len(self.truth.losses)) if weights is None else np.asarray(weights)
        G = scales(self.truth, w)
        S = [g * np.sqrt(x[0].size) for g, x in zip(G, self.leaves, strict=True)]
        # Without a direction there is no inner product either, and any tree will do.
        towards = jax.tree.leaves(keywords.get("direction", self.truth.grads))
        is_several = [v.ndim == x.ndim for v, x in zip(towards, self.leaves, strict=True)]
        dot = oracle.dots if all(is_several) else oracle.dot

        def those(xs: Sequence[Any]) -> list[Any]:
            return [x for x, yes in zip(xs, self.selected, strict=True) if yes]

        everything = "", self.leaves, S, towards, self.matrices
        for name, g, lengths, v, matrices in (
            everything,
            ("_where", *(those(xs) for xs in everything[1:])),
        ):
            scale = _length(lengths)
            if "norm" + name in stats:
                _assert_examples(stats["norm" + name], oracle.norm(g), w, error * scale, "norm" + name)
            if "gram" + name in stats:
                products = kept(np.asarray(stats["gram" + name]).T, w).T
                truth = kept(oracle.gram(g).T, w).T
                _assert_examples(products, truth, w, 2 * error * scale**2, "gram" + name)
            if "dot" + name in stats:
                _assert_examples(stats["dot" + name], dot(g, v), w, error * scale, "dot" + name)
            if "projected" + name in stats:
                bound = error * scale * max(np.linalg.norm(m, 2) for m in matrices if m.size)
                expected = oracle.projected(g, matrices)
                _assert_examples(stats["projected" + name], expected, w, bound, "projected" + name)

        for name, norms in stats.get("norm_by_group", {}).items():
            scale = _length([s for s, group in zip(S, self.groups, strict=True) if group == name])
            _assert_examples(norms, oracle.norm(self._of_group(name)), w, error * scale, f"norm {name}")
        by_group = {
            name: iter(oracle.clipped_mean(self._of_group(name), c, w))
            for name, c in self.max_norms.items()
        }
        clipped_by_group = [next(by_group[name]) for name in self.groups]

        weighted = jax.tree.leaves(oracle.weighted_mean(self.truth.grads, Soft(self.max_norm), w))
        truth, squares = (
            jax.tree.leaves(oracle.clipped_mean(self.truth.grads, self.max_norm, w, phi))
            for phi in (None, np.square)
        )
        flat = {name: self.tree.flatten_up_to(x) for name, x in stats.items() if name in OF_LEAVES}
        for name, leaves in flat.items():
            for i, g in enumerate(self.leaves):
                where = f"{name} of leaf {i}"
                match name:
                    case "norm_by_leaf_where" if not self.selected[i]:
                        assert leaves[i] is None, where
                    case "norm_by_leaf" | "norm_by_leaf_where":
                        _assert_examples(leaves[i], oracle.norm([g]), w, error * S[i], where)
                    case "clipped":
                        bound = error * G[i] * (1 + _length(S) / self.max_norm)
                        assert_within(leaves[i], truth[i], bound, where)
                    case "weighted":
                        bound = error * G[i] * (1 + _length(S) / self.max_norm)
                        assert_within(leaves[i], weighted[i], bound, where)
                    case "clipped_by_group":
                        bound = error * G[i] * (1 + _length(S) / self.max_norms[self.groups[i]])
                        assert_within(leaves[i], clipped_by_group[i], bound, where)
                    case "weighted_square_where" if not self.selected[i]:
                        assert leaves[i] is None, where
                    case "weighted_square_where":
                        soft = Soft(self.max_norm_of_leaf)
                        bound = 3 * G[i] * error * G[i] * (1 + S[i] / soft.c)
                        expected = oracle.weighted_mean(g, soft, w, np.square)
                        assert_within(leaves[i], expected, bound, where)
                    case "clipped_square":
                        bound = 3 * G[i] * error * G[i] * (1 + _length(S) / self.max_norm)
                        assert_within(leaves[i], squares[i], bound, where)
                    case "clipped_by_leaf":
                        c = self.max_norm_of_leaf
                        bound = error * G[i] * (1 + S[i] / c)
                        assert_within(leaves[i], oracle.clipped_mean(g, c, w), bound, where)


def _length(numbers: Sequence[float]) -> float:
    return float(np.sqrt(np.sum(np.square(numbers))))


def _assert_examples(result: Any, truth: Any, w: np.ndarray, bound: float, where: str) -> None:
    assert np.shape(result) == np.shape(truth), f"{where}: shape {np.shape(result)}"
    assert_within(kept(result, w), kept(truth, w), bound, where)
