"""Writes docs/support.md, the table of what pergrad takes apart, from the rules themselves.

    python docs/make_support.py

For every primitive that has a rule there is a loss here whose gradient ends in it. The strategies that
can reduce it are found by trying all of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

import pergrad as pg
from pergrad import _compat
from pergrad._cut import STEPS, TERMS
from pergrad._cut.hoist.hoist import RULES
from pergrad._ir import LOOPS, Is, those_that_are
from pergrad._strategies import STRATEGIES
from pergrad._trace.trace import CALLS

PAGE = Path(__file__).with_name("support.md")


def _convolution(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x[..., None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def _ragged(w: jax.Array, x: jax.Array) -> jax.Array:
    sizes = jnp.asarray([2, x.shape[1] - 2], jnp.int32)
    return lax.ragged_dot(x[0][:, None], w, sizes)


def _slice(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dynamic_slice(w, (jnp.argmax(x[0]),), (3,)) * x[0, :3]


# For each primitive the code that users write, the shape of a parameter, and a function of the parameter
# whose gradient ends in the primitive.
PROBES: dict[Any, tuple[str, tuple[int, ...], Callable[[jax.Array, jax.Array], jax.Array]]] = {
    primitives.dot_general_p: ("`x @ w`, einsum, dense layers", (8, 3), lambda w, x: x @ w),
    primitives.conv_general_dilated_p: ("convolutions", (3, 1, 4), _convolution),
    _compat.ragged_dot_general_p: ("`lax.ragged_dot`", (2, 1, 4), _ragged),
    primitives.scatter_add_p: (
        "indexing, `take`, embeddings",
        (16, 3),
        lambda w, x: w[x.astype(int) % 16],
    ),
    primitives.dynamic_update_slice_p: ("`lax.dynamic_slice`", (9,), _slice),
}
FAMILIES = {
    "move": "entries of the gradient change their places, and `phi` may come before or after",
    "scale": "entries are multiplied by numbers, and a factorable `phi` may come before",
    "mix": "any other linear step, and `phi` must come after",
}


def support_page() -> str:
    """The text of docs/support.md."""
    head = [
        "# What pergrad takes apart",
        "",
        "This page is written by `python docs/make_support.py`, from the rules themselves. Statistics",
        "are right for other primitives, too: a gradient that ends in one of them is formed for each",
        "example, and the plan names the primitive and the line.",
        "",
        "## Terms",
        "",
        "A term is the sum over positions that a parameter's gradient ends in. The strategies are those",
        "that give the second moment. *factored* needs a single position, as in `x @ w` with one row",
        "for each example.",
        "",
        "| primitive of the gradient | from | term | strategies |",
        "|---|---|---|---|",
    ]
    terms = sorted(_term_row(primitive) for primitive in TERMS)
    steps = ["", "## Steps after a term", "", "| family | primitives |", "|---|---|"]
    for family, meaning in FAMILIES.items():
        names = sorted(f"`{p.name}`" for p, step in STEPS.items() if step.family == family)
        steps.append(f"| *{family}*: {meaning} | {', '.join(names)} |")
    run_programs = LOOPS | those_that_are(Is.RUNS_BRANCHES)
    inside = sorted(f"`{p.name}`" for p in RULES if p in run_programs)
    # JAX 0.11.2 and later have another name for this one.
    own_names = {primitives.closed_call_p: "closed_call"}
    calls = sorted(f"`{own_names.get(p, p.name)}`" for p in CALLS if p not in RULES and p not in TERMS)
    rest = [
        "",
        "## Loops, branches and calls",
        "",
        f"- Factors leave {' and '.join(inside)}. The gradients of stacked layers are reduced inside",
        "  their `scan`, layer by layer, if all statistics are `Mean`, `Variance`, `Norm` or `Dot`.",
        f"- {', '.join(calls)} are rewritten when the loss is traced.",
        "  The recomputation of `jax.checkpoint` stays.",
        "- Mutable references that the loss makes (`jax.new_ref`) become arrays. References from",
        "  outside of the loss are refused.",
        "- `custom_jvp` and `custom_vjp` functions are differentiated by their own rules.",
        "- `while` can be in the forward pass, if JAX can differentiate the rest.",
    ]
    return "\n".join([*head, *terms, *steps, *rest]) + "\n"


def _term_row(primitive: Any) -> str:
    source, shape, use = PROBES[primitive]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(use(w, x)))

    args = jnp.ones(shape), jnp.ones((4, 8))
    plans = [(s.name, pg.explain(loss, pg.Mean(jnp.square), strategy=s.name)(*args)) for s in STRATEGIES]
    served = [name for name, plan in plans if plan.rows[0].strategy.partition(":")[0] == name]
    return f"| `{primitive.name}` | {source} | {plans[0][1].rows[0].kind} | {', '.join(served)} |"


if __name__ == "__main__":
    PAGE.write_text(support_page())
