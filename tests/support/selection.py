"""Which tests run, and which of them share a process. The names of files are those below `tests`."""

import datetime
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

# The seed of the first random program, which changes from day to day. The processes that share out the
# tests inherit it.
FIRST_PROGRAM = int(os.environ.setdefault("PERGRAD_SEED", str(1000 * datetime.date.today().toordinal())))

# Long lists of parameters, of which a third runs by default, chosen by a checksum of the test's name,
# and everything with PERGRAD_TESTS=all (`make test-all`). What meets every case and strategy is not
# among them. With PERGRAD_TESTS=few (the engine's tests on other versions of JAX) a third of every list
# runs, and a ninth of the long ones.
SHORTENED = {
    "library/test_cases.py": {"test_low_precision", "test_means_alone"},
    "library/test_cases_whole.py": {"test_whole_gradients_and_units", "test_mixed_precision"},
    "lab/bench/test_bench.py": {"test_every_model_agrees_with_vmap"},
    "cut/test_loops.py": {"test_elementwise_statistics", "test_all_that_can_leaves"},
    "strategies/test_precision.py": {
        "test_variance_is_accurate_when_the_mean_is_large",
        "test_equal_examples_have_no_variance",
        "test_long_sums_do_not_stagnate",
        "test_mixed_precision",
        "test_weights_are_counts",
        "test_example_of_weight_zero_may_be_anything",
    },
    "library/test_composition.py": {"test_vmap_over_an_ensemble", "test_derivative_of_statistics"},
    "cut/test_units.py": {
        "test_tokens",
        "test_tokens_by_any_strategy",
        "test_tokens_one_statistic_at_a_time",
    },
    "cut/test_factor_pairs.py": {
        "test_product_is_the_gradient",
        "test_only_residuals_depend_on_the_cotangent",
    },
    "statistics/test_whole_gradients.py": {
        "test_any_microbatch_and_strategy",
        "test_gradient_that_is_not_finite_is_not_dropped",
    },
}


# Files whose tests are runs of a few programs, which one process compiles once.
ONE_WORKER = {
    "lab/compare/test_sweep.py",
    "lab/pages/test_gather.py",
    "lab/run/test_train.py",
    "lab/studies/test_studies.py",
}


def name_of(item: Any) -> str:
    """The file of a test, below `tests`."""
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else str(item.path)


def group_of(item: Any) -> str | None:
    """The tests of a group run in one process (with --dist=loadgroup).

    A case's truth and trace are then made once.
    """
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return name_of(item) if name_of(item) in ONE_WORKER else getattr(case, "name", None)


def chosen(items: Sequence[Any]) -> list[Any]:
    """Those of the collected tests that run."""
    how_many = os.environ.get("PERGRAD_TESTS", "some")
    if how_many == "all":
        return list(items)
    seen: Counter[Any] = Counter()

    def runs(item: Any) -> bool:
        is_listed = item.originalname in SHORTENED.get(name_of(item), ())
        if how_many == "few":
            seen[item.path, item.originalname] += 1
            parts = (9 if is_listed else 3) if hasattr(item, "callspec") else 1
            return seen[item.path, item.originalname] % parts == 1 % parts
        return not is_listed or zlib.crc32(item.name.encode()) % 3 == 0

    return [item for item in items if runs(item)]
