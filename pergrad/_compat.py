"""The only file that imports JAX's internals, and the home of what differs between its versions.

pergrad is tested with JAX 0.7.2 (`make test-oldest`) to 0.12 (`make test-newest`). JAX 0.7.0 and 0.7.1
are out because Flax and Equinox exclude them. A newer JAX gets a warning that names the tested range,
and an error that may come from the difference says so (`newer_jax_explained`).

What differs between the versions, and where it is dealt with:

| JAX | difference | where |
|---|---|---|
| 0.7.2 | `get_bind_params` returns functions and parameters, later the parameters alone | `bind` |
| 0.7.2 | a convolution that widens its operands has no derivative | `_cut/terms/convolution.py` |
| 0.7.2 | `discharge_state` takes and returns constants apart from the program | `without_references` |
| 0.7.2 | `all_gather` has no `to`, which is a function of its own | `all_gather_for_all` |
| before 0.8.2 | `pvary` in place of `pcast` | `as_varying` |
| before 0.10 | an array's type has `vma`, later `mat` | `varying_axes` |
| 0.11.0 on | `Jaxpr` and `ClosedJaxpr` are one class, and calls hold either | `as_closed` |
| 0.11.0 on | `scan` has `ft_in` in place of `num_consts` and `num_carry` | `scan_lengths` |
| 0.11.2 on | `jax.experimental.shard_alike` is gone | `_call/spmd.py` does without it, always |
"""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pergrad._errors import PergradError

OLDEST, NEWEST = (0, 7, 2), (0, 12)
TESTED = "0.7.2 to 0.12"
_FOUND = f"pergrad is tested with JAX {TESTED}, and this is JAX {jax.__version__}."
_OLDER_JAX = f"Write pip install 'jax<0.{NEWEST[1] + 1}', or look for a newer pergrad."


def is_untested(version: tuple[int, ...]) -> bool:
    """Whether a version of JAX is newer than all that pergrad is tested with."""
    return version[: len(NEWEST)] > NEWEST


if jax.__version_info__ < OLDEST:
    raise ImportError(f"{_FOUND} Write pip install --upgrade jax.")
if is_untested(jax.__version_info__):
    warnings.warn(f"{_FOUND} If something fails: {_OLDER_JAX}", stacklevel=2)

try:
    from jax._src import source_info_util
    from jax._src.ad_checkpoint import name_p, remat_p
    from jax._src.core import NamedAxisEffect
    from jax._src.lax.lax import optimization_barrier_p, ragged_dot_general_p, split_p
    from jax._src.pjit import reshard_p, sharding_constraint_p
    from jax._src.state.discharge import discharge_state
    from jax._src.state.types import AbstractRef
    from jax.core import Tracer
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
    from jax.interpreters.partial_eval import dce_jaxpr
except ImportError as error:
    raise ImportError(f"{_FOUND} It lacks something that pergrad uses: {error}. {_OLDER_JAX}") from error

__all__ = [
    "Atom",
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "all_gather_for_all",
    "as_closed",
    "as_varying",
    "at_line_of",
    "aval",
    "bind",
    "drop_dead_code",
    "has_effects",
    "has_user_line",
    "is_computed",
    "is_reference",
    "line_of_error",
    "name_p",
    "newer_jax_explained",
    "optimization_barrier_p",
    "ragged_dot_general_p",
    "remat_barriers",
    "remat_p",
    "reshard_p",
    "scan_lengths",
    "sharding_constraint_p",
    "split_p",
    "user_line",
    "varying_axes",
    "without_references",
]

Atom = Var | Literal

# An error's "user line" is the user's, so our own frames are passed over as JAX's are.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)))


@contextlib.contextmanager
def newer_jax_explained() -> Iterator[None]:
    """Says that an error in here may come from a version of JAX that is newer than the tested ones.

    Such a version may have renamed what pergrad reads of an equation or imports.
    """
    try:
        yield
    except (AttributeError, ImportError, KeyError) as error:
        if not is_untested(jax.__version_info__):
            raise
        raise PergradError(
            f"{type(error).__name__}: {error}. If this does not come from your loss, it may come from a "
            f"version of JAX that is too new. {_FOUND} {_OLDER_JAX}"
        ) from error


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than compute its results. A collective does not."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


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


def as_closed(program: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The program that a call holds, with its constants; a `Jaxpr` of old versions has none."""
    return program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ())


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


def scan_lengths(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants and how many carried values a `scan` equation has.

    Up to JAX 0.10 two parameters say so. From 0.11.0 on the parameter `ft_in` holds the operands' places
    as a tree of three parts: constants, carry, inputs.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def user_line(eqn: JaxprEqn) -> str:
    """`file.py:12 (function)`: where the user wrote what became this equation."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return "an unknown line"
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"


def line_of_error(error: BaseException) -> str:
    """`file.py:12 (function)`: the last line of the user's on the way to where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if source_info_util.is_user_filename(frame.filename)]
    if not own:
        return "an unknown line"
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} ({own[-1].name})"


def has_user_line(eqn: JaxprEqn) -> bool:
    return source_info_util.user_frame(eqn.source_info.traceback) is not None


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes along which devices have different values of an array, as its type says.

    In the body of a `shard_map` that checks this (`check_vma=True`), a type names these axes. Anywhere
    else it names none.
    """
    own: Any = jax.typeof(x)
    return own.mat.varying if hasattr(own, "mat") else own.vma


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """The same array, whose type says that it varies along these mesh axes, too."""
    missing = tuple(axes - varying_axes(x))
    if not missing:
        return x
    functions: Any = jax.lax
    if hasattr(functions, "pcast"):
        return functions.pcast(x, missing, to="varying")
    return functions.pvary(x, missing)


def all_gather_for_all(x: Any, axis_name: Any) -> Any:
    """`lax.all_gather` along the first axis, whose result is the same for all members of the axis.

    In a `shard_map` that checks varying axes, the type of the result says so.
    """
    gather: Callable[..., Any] = jax.lax.all_gather
    if not varying_axes(x):
        return gather(x, axis_name, tiled=True)
    if "to" in inspect.signature(gather).parameters:
        return gather(x, axis_name, tiled=True, to="invarying")
    from jax._src.lax.parallel import all_gather_invariant

    return all_gather_invariant(x, axis_name, tiled=True)


def aval(v: Atom) -> Any:
    """The abstract value of a variable: its shape and dtype."""
    return v.aval


def is_computed(x: Any) -> bool:
    """Whether an equation of the program that is being traced has made this value.

    An argument of that program is made by none. Of values under `vmap` or `grad` it is not known, and
    not said.
    """
    return isinstance(x, Tracer) and getattr(x, "parent", None) is not None


def is_reference(v: Atom) -> bool:
    """Whether a variable is a mutable reference (`jax.new_ref`) rather than an array."""
    return isinstance(aval(v), AbstractRef)


def without_references(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with arrays in the place of the mutable references that it makes."""
    discharge: Callable[..., Any] = discharge_state
    if "consts" in inspect.signature(discharge).parameters:
        return ClosedJaxpr(*discharge(program.jaxpr, program.consts))
    return discharge(program)
