"""Which tests run. The names of files are those below `tests`.

Everything that runs everywhere would take too long, so that tests with long lists of parameters take
turns. A checksum of its parameters gives every test a number from 0 to 23, so that tests of the same
case have the same number and share what is made for it. Every run has its turn, a number from 0 to 23,
too, which changes from commit to commit. A test runs if its number is the turn's, both modulo a number
of parts, which depends on the list:

    PERGRAD_TESTS   a list in LONGEST   one in SHORTENED   another in a folder   one beside the folders
    all             all of it           all of it          all of it             all of it
    some            a 24th              a twelfth          a third               all of it
    few             a 24th              a 24th             a sixth               a quarter

`some` is what runs without that variable. PERGRAD_TURN sets the turn. A test that is named on the
command line (`file.py::test`) runs in any turn.
"""

import datetime
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
TURNS = 24

# The seed of the first random program, which changes from day to day. The processes that share out the
# tests inherit it.
FIRST_PROGRAM = int(os.environ.setdefault("PERGRAD_SEED", str(1000 * datetime.date.today().toordinal())))


def _turn() -> int:
    """The turn of the commit that is checked out, or of the day where there is no repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True).stdout
        return int(commit, 16) % TURNS
    except (OSError, subprocess.CalledProcessError):
        return datetime.date.today().toordinal() % TURNS


# As with the seed, the processes that share out the tests inherit the turn.
TURN = int(os.environ.setdefault("PERGRAD_TURN", str(_turn())))
HOW_MANY = os.environ.get("PERGRAD_TESTS", "some")

# Long lists of parameters.
SHORTENED = {
    "call/test_check.py": {"test_good_loss", "test_examples_that_meet"},
    "cut/test_lookups.py": {"test_whole_gradients", "test_no_table_for_each_example"},
    "library/test_cases.py": {
        "test_auto",
        "test_strategies",
        "test_low_precision",
        "test_means_alone",
        "test_gradients_in_blocks",
        "test_with_and_without_a_step",
    },
    "library/test_devices.py": {
        "test_every_statistic",
        "test_models",
        "test_two_axes_and_any_strategy",
        "test_examples_that_fail_are_dropped",
        "test_only_finished_statistics_travel",
        "test_work_falls_with_the_number_of_devices",
        "test_keys_that_are_unsafe_to_map",
        "test_mesh_of_the_arguments",
        "test_in_a_shard_map_of_the_user",
        "test_combining",
    },
    "library/test_sharded_parameters.py": {
        "test_every_statistic",
        "test_two_axes",
        "test_layers",
        "test_several_directions_of_layers",
        "test_layers_that_leave_their_loop",
        "test_examples_that_fail_are_dropped",
        "test_blocks",
    },
    "library/test_varying.py": {"test_every_statistic"},
    "library/test_frameworks.py": {"test_model_meets_the_oracle"},
    "library/test_nonfinite.py": {"test_dropped", "test_a_large_gradient_is_not_dropped"},
    "library/test_integrations.py": {
        "test_statistics",
        "test_half_precision",
        "test_check_accepts",
        "test_check_of_a_mean_over_all_tokens",
    },
    "lab/run/test_train.py": {"test_every_model", "test_every_optimizer"},
    "lab/studies/test_studies.py": {"test_study", "test_page_in_a_browser"},
    "plan/test_plan.py": {"test_truth"},
    "optim/test_optim.py": {
        "test_keeps_dtypes",
        "test_a_changed_gradient_is_refused",
        "test_a_changed_gradient_is_fine_for_those_of_the_mean_alone",
        "test_a_gradient_computed_apart_is_fine",
        "test_several_batches_are_one_step",
        "test_clipped_is_as_if_every_gradient_had_been_scaled",
    },
    "library/test_cases_whole.py": {"test_whole_gradients_and_units", "test_mixed_precision"},
    "lab/bench/test_bench.py": {"test_every_model_agrees_with_vmap"},
    "cut/test_loops.py": {"test_elementwise_statistics", "test_all_that_can_leaves"},
    "strategies/test_precision.py": {
        "test_variance_is_accurate_when_the_mean_is_large",
        "test_variance_with_weights_is_accurate_when_the_mean_is_large",
        "test_equal_examples_have_no_variance",
        "test_long_sums_do_not_stagnate",
        "test_squares_of_small_half_precision_gradients_do_not_vanish",
        "test_mixed_precision",
        "test_products_of_any_layout_in_mixed_precision",
        "test_variance_is_never_negative",
        "test_variance_from_products",
        "test_weights_are_counts",
        "test_example_of_weight_zero_may_be_anything",
    },
    "library/test_composition.py": {
        "test_eager_and_jit",
        "test_vmap_over_an_ensemble",
        "test_derivative_of_statistics",
        "test_keys_that_are_unsafe_to_map_do_not_depend_on_the_microbatch",
    },
    "cut/test_units.py": {
        "test_tokens",
        "test_tokens_by_any_strategy",
        "test_tokens_one_statistic_at_a_time",
    },
    "cut/test_positions.py": {"test_positions", "test_any_strategy"},
    "cut/test_factor_pairs.py": {
        "test_product_is_the_gradient",
        "test_only_residuals_depend_on_the_cotangent",
    },
    "statistics/test_by_norm.py": {"test_any_weight", "test_bad_max_norm"},
    "statistics/test_gram.py": {"test_every_case", "test_any_block_and_strategy"},
    "statistics/test_project.py": {"test_any_strategy_and_microbatch"},
    "statistics/test_whole_gradients.py": {
        "test_any_microbatch_and_strategy",
        "test_gradient_that_is_not_finite_is_not_dropped",
    },
    "test_project.py": {"test_page"},
}

# Longer ones, of which each test takes a process with eight devices several seconds.
LONGEST = {
    "library/test_sharded_parameters.py": {"test_case"},
    "library/test_varying.py": {"test_case"},
}

# Into how many parts a list is divided, of which one runs.
PARTS = {
    "longest": {"all": 1, "some": TURNS, "few": TURNS},
    "long": {"all": 1, "some": 12, "few": 24},
    "short": {"all": 1, "some": 3, "few": 6},
    "brief": {"all": 1, "some": 1, "few": 4},
}


def file_of(item: Any) -> str:
    """The file of a test, below `tests`."""
    return Path(os.path.relpath(item.path, TESTS)).as_posix()


def length_of(item: Any) -> str:
    """How long the list of parameters of a test is."""
    file, name = file_of(item), item.originalname
    if name in LONGEST.get(file, ()):
        return "longest"
    if name in SHORTENED.get(file, ()):
        return "long"
    return "short" if "/" in file else "brief"


def runs(name: str, length: str, how_many: str, turn: int) -> bool:
    """Whether the test of this name, one of a list of parameters, has its turn."""
    parts = PARTS[length][how_many]
    parameters = name.partition("[")[2]
    return zlib.crc32(parameters.encode()) % parts == turn % parts


def chosen(items: Sequence[Any]) -> list[Any]:
    """Those of the collected tests that run."""
    return [
        item
        for item in items
        if item.name == item.originalname  # it has no parameters
        or runs(item.name, length_of(item), HOW_MANY, TURN)
    ]


def lists_of(items: Sequence[Any]) -> dict[str, int]:
    """How many of these tests each list has."""
    return dict(Counter(f"{file_of(item)}::{item.originalname}" for item in items))


def header() -> str:
    return (
        f"{HOW_MANY} of the tests with lists of parameters, in turn {TURN} of 0 to {TURNS - 1} "
        f"(set PERGRAD_TURN={TURN} to repeat it, PERGRAD_TESTS=all to run all)"
    )


def summary(left_out: dict[str, int]) -> list[str]:
    """What was left out of a run, list by list."""
    first = f"{sum(left_out.values())} tests were left out, which have other turns than {TURN}:"
    return [first, *(f"{number:6}  {name}" for name, number in sorted(left_out.items()))]
