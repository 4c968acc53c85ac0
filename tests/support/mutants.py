"""Small mistakes in the engine, each of which the tests must notice.

    python -m tests.support.mutants            # all of them; `make mutants` does that
    python -m tests.support.mutants streamed   # those whose name contains a word

A mutant is the package with one line changed: a sign, a missing weight, a wrong axis. For each the tests
that are named beside it run on a copy of the project, and one of them has to fail. What survives is
listed at the end. There is a mutant for every strategy, every kind of term, every statistic and every
way in which results are merged (`tests/library/test_mutants.py` holds the list to that).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.pages import ROOT

AT_ONCE = 2
# What the tests need of the project.
COPIED = (
    "pergrad",
    "tests",
    "docs",
    "examples",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "pyproject.toml",
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`of` names what is broken: in `file`, `before` becomes `after`. `tests` are pytest's arguments."""

    of: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def cases(*names: str, file: str = "tests/library/test_cases.py") -> tuple[str, ...]:
    """The tests of these cases."""
    return file, "-k", " or ".join(f"[{name}] or [{name}-" for name in names)


WHOLE = ("tests/statistics/test_whole_gradients.py", "-k", "test_alone or microbatch or weights")
BY_NORM = ("tests/statistics/test_by_norm.py", "-k", "any_weight or max_norm")
DROPPED = ("tests/library/test_nonfinite.py", "-k", "against_the_oracle or large_gradient")
GROUPS = ("tests/cut/test_units.py", "-k", "test_groups or padding")
TOKENS = ("tests/cut/test_units.py", "-k", "test_tokens")
COMBINED = ("tests/statistics/test_combine.py", "-k", "not devices")
DEVICES = ("tests/library/test_devices.py",)
SHARDED = ("tests/library/test_sharded_parameters.py",)

MUTANTS = (
    # strategies
    Mutant(
        "Summed",
        "pergrad/_cut/tail.py",
        "g + jnp.asarray(total - 1, c.dtype) * c for",
        "g + jnp.asarray(total, c.dtype) * c for",
        cases("regularised"),
    ),
    Mutant(
        "Summed",
        "pergrad/_strategies/summed.py",
        "return pull(job.direction)[0]",
        "return jnp.abs(pull(job.direction)[0])",
        WHOLE,
    ),
    Mutant(
        "Factored",
        "pergrad/_strategies/factored.py",
        "x * mean.apply(tail.number_of(",
        "x * (tail.number_of(",
        cases("scaled_parameters"),
    ),
    Mutant(
        "Centred",
        "pergrad/_strategies/centred.py",
        "lax.scan(lambda m2, xs: (added(m2, xs), None), m2, groups)",
        "lax.scan(lambda m2, xs: (added(m2, xs), None), 0 * m2, groups)",
        ("tests/strategies/test_precision.py", "-k", "centred"),
    ),
    Mutant(
        "Centred",
        "pergrad/_strategies/centred.py",
        "m2 = m2 + weigh(",
        "m2 = m2 - weigh(",
        cases("mlp"),
    ),
    Mutant(
        "Centred, from products",
        "pergrad/_strategies/centred.py",
        "m2 = squares - share * jnp.square(mean)",
        "m2 = squares - jnp.square(mean)",
        ("tests/strategies/test_precision.py", "-k", "from_products"),
    ),
    Mutant(
        "Centred, digits that are lost",
        "pergrad/_strategies/centred.py",
        "jnp.all(squares <= MOST_LOST * m2)",
        "jnp.any(squares <= jnp.inf)",
        ("tests/strategies/test_precision.py", "-k", "mean_is_large and centred"),
    ),
    Mutant(
        "InnerProducts",
        "pergrad/_strategies/gram.py",
        "square = jnp.square(tail.similarity(env, x.dtype))",
        "square = tail.similarity(env, x.dtype)",
        ("tests/library/test_cases_whole.py", "-k", "test_every_strategy and scaled"),
    ),
    Mutant(
        "Streamed",
        "pergrad/_strategies/streamed.py",
        "states, of_first = lax.scan(one, states, first, length=rest)",
        "_, of_first = lax.scan(one, states, first, length=rest)",
        (
            "tests/strategies/test_precision.py",
            "tests/library/test_cases.py",
            "-k",
            "stream or accelerators",
        ),
    ),
    Mutant(
        "Streamed",
        "pergrad/_strategies/streamed.py",
        "gs, w = gradients(factors), examples.weights if w is None else w",
        "gs, w = gradients(factors), examples.total / examples.size",
        cases("mlp", "transformer"),
    ),
    Mutant(
        "Streamed, in blocks",
        "pergrad/_strategies/streamed.py",
        "return lax.dynamic_update_slice_in_dim(x, new, self.first, axis)",
        "return lax.dynamic_update_slice_in_dim(x, new, 0, axis)",
        ("tests/library/test_cases.py", "-k", "in_blocks"),
    ),
    Mutant(
        "Lookups that come early",
        "pergrad/_trace/lookups.py",
        "return lax.sub(x, lax.broadcast_in_dim(number, jnp.shape(x), axes))",
        "return lax.add(x, lax.broadcast_in_dim(number, jnp.shape(x), axes))",
        ("tests/trace/test_lookups.py",),
    ),
    Mutant(
        "Sparse",
        "pergrad/_strategies/sparse.py",
        "mean.apply(values) - mean.apply(zero)",
        "mean.apply(values)",
        cases("embedding_indexed"),
    ),
    Mutant(
        "Sparse, looked up twice",
        "pergrad/_strategies/sparse.py",
        "for way in self.ways:",
        "for way in self.ways[:1]:",
        cases("looked_up_twice"),
    ),
    Mutant(
        "Sparse, rows left out",
        "pergrad/_strategies/sparse.py",
        "values = jnp.where(arrives != 0, values, 0)",
        "pass",
        cases("masked_twice"),
    ),
    Mutant(
        "Sparse, what is not finite",
        "pergrad/_strategies/sparse.py",
        "return 0 if self.of_nothing is None else jnp.sum(jnp.square(self.of_nothing))",
        "return 0",
        ("tests/cut/test_lookups.py", "-k", "not_finite"),
    ),
    Mutant(
        "ways: layouts",
        "pergrad/_cut/ways.py",
        "return [stride.layout for stride in self.strides if not stride.stays]",
        "return []",
        cases("looked_up_in_two_layouts"),
    ),
    Mutant(
        "ways: numbers",
        "pergrad/_cut/ways.py",
        "return self._transposed(env, dtype, scales=True)",
        "return jnp.ones((), dtype)",
        cases("scaled_rows"),
    ),
    Mutant(
        "Sparse",
        "pergrad/_strategies/sparse.py",
        "jnp.maximum(self.n - t, 0)) * jnp.square(mean)",
        "jnp.maximum(self.n - t, 0)) * mean",
        cases("embedding_indexed"),
    ),
    Mutant(
        "Materialise",
        "pergrad/_strategies/materialise.py",
        "return job.fed(tail, gs, examples.weights)",
        "return job.fed(tail, gs, 1 / examples.size)",
        cases("mlp"),
    ),
    # terms
    Mutant(
        "Product",
        "pergrad/_cut/terms/product.py",
        "return product(*weigh_factors(x.astype(dtype), d.astype(dtype), w))",
        "return product(x.astype(dtype), d.astype(dtype))",
        cases("mlp"),
    ),
    Mutant(
        "Convolution",
        "pergrad/_cut/terms/convolution.py",
        "starts = [strides[axis] * p for",
        "starts = [p for",
        cases("conv_3d", "conv_depthwise"),
    ),
    Mutant(
        "Ragged",
        "pergrad/_cut/terms/ragged.py",
        "order = jnp.argsort(_groups(sizes, x.shape[1]).reshape(-1), stable=True)",
        "order = jnp.arange(x.shape[0] * x.shape[1])",
        ("tests/library/test_cases.py", "-k", "ragged"),
    ),
    Mutant(
        "Scatter",
        "pergrad/_cut/terms/scatter.py",
        'table.at[keys.reshape(-1)].add(values.reshape(size * n, *row), mode="drop")',
        'table.at[keys.reshape(-1)].set(values.reshape(size * n, *row), mode="drop")',
        cases("embedding_indexed"),
    ),
    Mutant(
        "Slice",
        "pergrad/_cut/terms/scatter.py",
        "start = jnp.clip(starts[a], 0, table_shape[a] - part_shape[a])",
        "start = jnp.clip(starts[a], 0, table_shape[a])",
        ("tests/library/test_cases.py", "-k", "slice"),
    ),
    Mutant(
        "Total",
        "pergrad/_cut/terms/total.py",
        "return jnp.sum(weigh(widen(env[self.out]), w), axis=0)",
        "return jnp.sum(widen(env[self.out]), axis=0)",
        cases("layer_norm_mlp"),
    ),
    Mutant(
        "Sum",
        "pergrad/_cut/terms/total.py",
        "x = jnp.moveaxis(x, [a + 1 for a in self.axes], range(1, 1 + len(self.axes)))",
        "x = jnp.moveaxis(x, [a for a in self.axes], range(1, 1 + len(self.axes)))",
        TOKENS,
    ),
    # statistics
    Mutant(
        "Mean",
        "pergrad/_statistics/of_parameters.py",
        "return added(state, weigh(self.apply(g), w))",
        "return added(state, self.apply(g))",
        cases("mlp"),
    ),
    Mutant(
        "Variance",
        "pergrad/_statistics/of_parameters.py",
        "m2 + weigh(jnp.square(d), of_g * share)",
        "m2 + weigh(jnp.square(d), of_g)",
        cases("mlp"),
    ),
    Mutant(
        "Variance",
        "pergrad/_statistics/of_parameters.py",
        "m2_a + m2_b + jnp.square(d) * (s_a * of_b)",
        "m2_a + m2_b",
        cases("mlp", "transformer"),
    ),
    Mutant(
        "Fold",
        "pergrad/_statistics/of_parameters.py",
        "jnp.where(w > 0, n, s)",
        "n",
        cases("mlp"),
    ),
    Mutant(
        "Individual",
        "pergrad/_statistics/of_parameters.py",
        """    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        return g
""",
        """    def of(self, g: jax.Array, direction: Any) -> jax.Array:
        return -g
""",
        cases("mlp"),
    ),
    Mutant(
        "Norm",
        "pergrad/_statistics/of_examples.py",
        "return jnp.sum(jnp.square(widen(g)))",
        "return jnp.sum(jnp.abs(widen(g)))",
        WHOLE,
    ),
    Mutant(
        "Dot",
        "pergrad/_statistics/of_examples.py",
        "return jnp.sum(widen(g) * direction)",
        "return jnp.sum(widen(g) * jnp.abs(direction))",
        WHOLE,
    ),
    Mutant(
        "Gram",
        "pergrad/_statistics/of_examples.py",
        "return own @ gs.T",
        "return jnp.abs(own @ gs.T)",
        WHOLE,
    ),
    Mutant(
        "WeightedMean",
        "pergrad/_statistics/by_norm.py",
        "return jnp.where(counts, w * own.astype(w.dtype), 0)",
        "return jnp.where(counts, own.astype(w.dtype) / w.size, 0)",
        WHOLE,
    ),
    Mutant(
        "WeightedMean",
        "pergrad/_run/by_norm.py",
        "if statistic.norm_at(paths[param]) == norm]",
        "if statistic.norm_at(paths[param])]",
        BY_NORM,
    ),
    Mutant(
        "ClippedMean",
        "pergrad/_statistics/by_norm.py",
        "c = jnp.where(norm > most,",
        "c = jnp.where(norm < most,",
        WHOLE,
    ),
    Mutant(
        "ClippedMean",
        "pergrad/_call/max_norms.py",
        "found = {i: found[name] for",
        "found = {i: max(found.values()) for",
        BY_NORM,
    ),
    # examples that are dropped
    Mutant(
        "dropped examples",
        "pergrad/_run/finite.py",
        "return lax.cond(unknown, look,",
        "return lax.cond(unknown, lambda _: known,",
        DROPPED,
    ),
    Mutant(
        "dropped examples",
        "pergrad/_run/finite.py",
        "finite = jnp.isfinite(losses)",
        "finite = jnp.isfinite(losses) | True",
        DROPPED,
    ),
    Mutant(
        "dropped examples",
        "pergrad/_call/call.py",
        "outcome = with_shares_of_kept(outcome, self._count(kept) / count)",
        "",
        DROPPED,
    ),
    Mutant(
        "dropped examples",
        "pergrad/_statistics/of_parameters.py",
        "return share * factor, mean, m2 * factor",
        "return share * factor, mean, m2",
        DROPPED,
    ),
    Mutant(
        "Projected",
        "pergrad/_strategies/projected.py",
        "rows, columns = (d, x) if first_is_columns else (x, d)",
        "rows, columns = (x, d) if first_is_columns else (d, x)",
        ("tests/statistics/test_project.py",),
    ),
    Mutant(
        "Project",
        "pergrad/_statistics/sketch.py",
        "key = jax.random.fold_in(key, word)",
        "key = jax.random.fold_in(key, 1)",
        ("tests/statistics/test_project.py",),
    ),
    Mutant(
        "Factors",
        "pergrad/_cut/factor_pairs.py",
        "d = d * (unit.similarity(env, d.dtype) / contributions(self.tail, 0))",
        "d = d * unit.similarity(env, d.dtype)",
        ("tests/cut/test_factor_pairs.py",),
    ),
    Mutant(
        "Count",
        "pergrad/_call/call.py",
        "return self.devices.add(jnp.sum(weights))",
        "return self.devices.add(jnp.sum(weights > 0))",
        cases("mlp"),
    ),
    Mutant(
        "Loss",
        "pergrad/_call/call.py",
        "value = self.devices.add(weighted_sum(losses, shares))",
        "value = self.devices.add(jnp.mean(losses))",
        cases("mlp"),
    ),
    # units and microbatches
    Mutant(
        "groups",
        "pergrad/_cut/units.py",
        "shares = w / jnp.where(weights > 0, weights, 1)[:, None]",
        "shares = jnp.full_like(w, 1 / k)",
        GROUPS,
    ),
    Mutant(
        "tokens",
        "pergrad/_cut/units.py",
        "env[term.out] = contribution if total == 1 else contribution * total",
        "env[term.out] = contribution",
        TOKENS,
    ),
    Mutant(
        "microbatches",
        "pergrad/_run/microbatches.py",
        "w = jnp.concatenate([w, jnp.zeros(missing, w.dtype)])",
        "w = jnp.concatenate([w, w[:missing]])",
        WHOLE,
    ),
    # merges
    Mutant(
        "Merging.ADDED",
        "pergrad/_statistics/combine.py",
        "                return self.add(results)\n",
        "                return results[0]\n",
        COMBINED,
    ),
    Mutant(
        "Merging.WEIGHED",
        "pergrad/_statistics/combine.py",
        "weigh(m.astype(dtype), n) for m, n in zip(means",
        "m.astype(dtype) * self.add(counts) / 2 for m, n in zip(means",
        COMBINED,
    ),
    Mutant(
        "Merging.CENTRED",
        "pergrad/_statistics/combine.py",
        "weigh((n - 1) * v + n * jnp.square(m.astype(dtype) - mean), n > 0)",
        "weigh((n - 1) * v, n > 0)",
        COMBINED,
    ),
    Mutant(
        "Merging.JOINED",
        "pergrad/_statistics/combine.py",
        "return jax.tree.map(lambda *x: self.join(x), *results)",
        "return jax.tree.map(lambda *x: self.join(x[::-1]), *results)",
        COMBINED,
    ),
    Mutant(
        "part_of_all",
        "pergrad/_statistics/of_parameters.py",
        "return share, mean, m2_s + weigh(jnp.square(mean_s - mean), s)",
        "return share, mean, m2_s",
        DEVICES,
    ),
    Mutant(
        "shard_of_all",
        "pergrad/_statistics/of_parameters.py",
        "return mean, division.add(m2_s) + between",
        "return mean, division.add(m2_s)",
        SHARDED,
    ),
    Mutant(
        "in_pieces",
        "pergrad/_ir/shards.py",
        "lax.dynamic_slice_in_dim(x, k * length, length, self.dim + 1)",
        "lax.dynamic_slice_in_dim(x, 0 * length, length, self.dim + 1)",
        ("tests/library/test_sharded_parameters.py", "-k", "exchanged_in_pieces"),
    ),
    Mutant(
        "labels from the scope around the loss",
        "pergrad/_call/scope.py",
        "if size == 1 or not arrays or _error_of(lambda: loss_of_batch(size)):",
        "if size == 1 or not arrays:",
        ("tests/call/test_errors.py", "-k", "arrays_from_outside"),
    ),
    Mutant(
        "keys from the scope around the loss",
        "pergrad/_call/scope.py",
        "is_in(eqn.invars[0], keyed) and not is_in(eqn.invars[0], own):",
        "is_in(eqn.invars[0], keyed):",
        ("tests/call/test_errors.py", "-k", "key_from_outside"),
    ),
    Mutant(
        "values of examples of weight 0",
        "pergrad/_run/reduce.py",
        "return dataclasses.replace(self.units(choice.units), weights=1.0)",
        "return self.units(choice.units)",
        ("tests/statistics/test_project.py", "-k", "weight_0"),
    ),
    Mutant(
        "branches on teams of devices",
        "pergrad/_run/microbatches.py",
        "return not (devices.are_teams and takes_branches_by(program.jaxpr.eqns, program.example))",
        "return True",
        ("tests/library/test_devices_apart.py", "-k", "branches"),
    ),
    Mutant(
        "branches inside of calls on teams of devices",
        "pergrad/_ir/dependence.py",
        "elif any(depends) and any(map(_has_branches, programs(eqn))):",
        "elif False:",
        ("tests/library/test_devices_apart.py", "-k", "branches_inside"),
    ),
    Mutant(
        "rounds on teams of devices",
        "pergrad/_trace/rounds.py",
        "lambda state: devices.any_team(goes_on(state))",
        "goes_on",
        ("tests/library/test_devices_apart.py", "-k", "rounds"),
    ),
    Mutant(
        "blocks of shards",
        "pergrad/_strategies/streamed.py",
        "parts = lax.dynamic_update_slice_in_dim(parts, self._parts(new, axis), self.first, axis + 1)",
        "pass",
        (f"{SHARDED[0]}::test_blocks",),
    ),
    Mutant(
        "varying literals",
        "pergrad/_ir/varying.py",
        "ins = [vary(_typed(env, v)) for v in eqn.invars]",
        "ins = [_typed(env, v) for v in eqn.invars]",
        ("tests/library/test_varying.py::test_every_statistic",),
    ),
    Mutant(
        "slice of a shard",
        "pergrad/_trace/gathers.py",
        "if not all(isinstance(v, Literal) for v in eqn.invars[1:]):",
        "if False:",
        (f"{SHARDED[0]}::test_case[dynamic_slice-False]",),
    ),
    Mutant(
        "merge of devices",
        "pergrad/_ir/devices.py",
        "state = _select(takes, two(state, other), state)",
        "state = _select(takes, two(other, state), state)",
        DEVICES,
    ),
)


def is_noticed(mutant: Mutant) -> bool:
    """Whether one of the tests beside the mutant fails with it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        copy.mkdir()
        for name in COPIED:
            copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copied(ROOT / name, copy / name)
        path = copy / mutant.file
        text = path.read_text()
        assert text.count(mutant.before) == 1, f"{mutant.file} has not one {mutant.before!r}"
        path.write_text(text.replace(mutant.before, mutant.after))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        # All of the lists, so that it depends on no turn whether a mutant is noticed.
        env = os.environ | {"PERGRAD_TESTS": "all"}
        ran = subprocess.run(command, env=env, cwd=copy, capture_output=True, text=True)
        assert ran.returncode in (0, 1), f"{mutant.of}: no test ran\n{ran.stdout}{ran.stderr}"
        return ran.returncode == 1


def survivors(mutants: Sequence[Mutant]) -> Iterator[Mutant]:
    """Those that no test notices; says of each what became of it."""

    def timed(mutant: Mutant) -> tuple[Mutant, bool, float]:
        start = time.monotonic()
        return mutant, is_noticed(mutant), time.monotonic() - start

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, noticed, seconds in pool.map(timed, mutants):
            what = "noticed" if noticed else "SURVIVED"
            print(f"{what:8}  {seconds:5.0f} s  {mutant.of}: {mutant.after.strip()}", flush=True)
            if not noticed:
                yield mutant


def main(words: Sequence[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word.lower() in m.of.lower() for word in words)]
    left = list(survivors(chosen))
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutants were noticed.")
    return 1 if left or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
