"""The only file that imports JAX's internals, and the home of what differs between its versions.

Supported: JAX 0.7.0 and newer. `make test-oldest` runs the whole suite on 0.7.0.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jax._src import source_info_util
from jax._src.ad_checkpoint import name_p, remat_p
from jax._src.lax.lax import optimization_barrier_p, ragged_dot_general_p, split_p
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters.partial_eval import dce_jaxpr

__all__ = [
    "Atom",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "at_line_of",
    "aval",
    "bind",
    "drop_dead_code",
    "has_user_line",
    "name_p",
    "optimization_barrier_p",
    "ragged_dot_general_p",
    "remat_barriers",
    "remat_p",
    "split_p",
    "user_line",
]

Atom = Var | Literal

# An error's "user line" is the user's, so our own frames are passed over as JAX's are.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)))


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluates one equation as `jax.core.eval_jaxpr` does, keeping its context and its user line."""
    bind_params = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    with at_line_of(eqn):
        out = eqn.primitive.bind(*subfuns, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def at_line_of(eqn: JaxprEqn) -> Iterator[None]:
    """What is traced in here has the equation's context, and the user's line is the equation's."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        yield


def drop_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """The same program, inputs and outputs, without the equations that no output needs."""
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return live


def remat_barriers(eqn: JaxprEqn) -> list[bool]:
    """Which arguments of a `remat` equation stand behind a barrier, as in its lowering."""
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, bool):
        prevent_cse = (prevent_cse,) * len(eqn.invars)
    return [eqn.params["differentiated"] and bool(p) for p in prevent_cse]


def user_line(eqn: JaxprEqn) -> str:
    """`file.py:12 (function)`: where the user wrote what became this equation."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return "an unknown line"
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"


def has_user_line(eqn: JaxprEqn) -> bool:
    return source_info_util.user_frame(eqn.source_info.traceback) is not None


def aval(v: Atom) -> Any:
    """The abstract value of a variable: its shape and dtype."""
    return v.aval
