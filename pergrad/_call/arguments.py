"""The role of each argument of a call, and what can be wrong with an argument that has no role.

An argument without a role is the same for all examples. That is right for a learning rate or the frozen
state of a model. It is wrong for labels (every example would meet the labels of all examples), and for a
PRNG key (every example would get the same dropout mask). The loss does not show such a mistake, but the
arguments do: labels are as long as the batch, and keys have a dtype of their own. So such arguments are
refused unless the request names them in `shared_argnums`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pergrad._call.request import ArgNums, Request, as_tuple
from pergrad._errors import ArgumentError, PergradError

NNX_MODULE = "flax.nnx.module", "Module"  # by name, because pergrad does not need Flax


class Roles(NamedTuple):
    """The numbers of the arguments that have each role, counted from the front."""

    argnums: tuple[int, ...]
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    shared_argnums: tuple[int, ...]


def roles_of(request: Request, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Roles:
    """The roles that the request gives to these arguments. An argument has one role at most."""
    roles = Roles(*(places(name, getattr(request, name), args, kwargs) for name in Roles._fields))
    seen: dict[int, str] = {}
    for name, numbers in zip(Roles._fields, roles, strict=True):
        for number in numbers:
            if number in seen:
                raise ArgumentError(
                    f"argument {number} is named by {seen[number]} and by {name}; an argument has one "
                    "role."
                )
            seen[number] = name
    return roles


def places(
    name: str, argnums: ArgNums, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """The value `argnums` of the option `name`, as argument numbers that count from the front."""
    numbers, n = as_tuple(argnums), len(args)
    if all(-n <= number < n for number in numbers):
        return tuple(number % n for number in numbers)
    way_out = ""
    if kwargs:
        way_out = " Arguments given by keyword are not counted: give this one by position."
    elif name == "batch_argnums" and n == 1:
        way_out = (
            " The batch must be an argument, because the loss is called with one example at a time. If "
            "the loss takes the batch from the scope around it, make the batch an argument of the loss, "
            "`def loss_fn(params, batch): ...`, and call the function with both, "
            "`stats_fn(params, batch)`."
        )
    known = f"{n} positional argument{'' if n == 1 else 's'}"
    raise ArgumentError(f"{name}={argnums} needs more than the {known} of this call.{way_out}")


def named_leaves(args: Sequence[Any], numbers: Iterable[int]) -> Iterator[tuple[str, int, Any]]:
    """For each leaf of these arguments its path, the number of its argument, and the leaf."""
    for n in numbers:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[n]):
            yield f"args[{n}]{jax.tree_util.keystr(path)}", n, leaf


def check_others(
    request: Request, roles: Roles, args: Sequence[Any], kwargs: Mapping[str, Any], size: int
) -> None:
    """Refuses arguments without a role that likely make the results for `size` examples wrong."""
    named = {number for numbers in roles for number in numbers}
    others = [n for n in range(len(args)) if n not in named]
    leaves = list(named_leaves(args, others))
    for path, n, leaf in leaves:
        if is_key(leaf) and (is_one_key(leaf) or not _is_as_long(leaf, size)):
            _refuse_key(path, n, leaf, roles, args[n])
    long = [(path, n, leaf) for path, n, leaf in leaves if _is_as_long(leaf, size)]
    if long:
        _refuse_long(long, roles, args, size)
    for name, value in kwargs.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            path = name + jax.tree_util.keystr(path)
            partial = f"functools.partial({_name(request.fun)}, {name}={name})"
            if _is_as_long(leaf, size):
                raise ArgumentError(
                    f"the keyword argument {path} is {kind(leaf)}, as long as the batch of {size} "
                    "examples. An argument given by keyword is the same for all examples. If it belongs "
                    "to them, give it by position and name its place in batch_argnums. If it is the "
                    f"same for all, bind it: {partial}."
                )
            if is_key(leaf):
                raise ArgumentError(
                    f"the keyword argument {path} is {a_key(leaf)}. An argument given by keyword is "
                    "the same for all examples, so all of them would draw the same numbers. Give it by "
                    f"position and name its place, as in rng_argnums={len(args)}, or in "
                    f"shared_argnums={len(args)} if all examples shall draw the same numbers."
                )


def _refuse_long(
    long: Sequence[tuple[str, int, Any]], roles: Roles, args: Sequence[Any], size: int
) -> NoReturn:
    numbers = {n for _, n, _ in long}
    shown = ", ".join(f"{path} ({kind(leaf)})" for path, _, leaf in long[:3])
    shown += f" and {len(long) - 3} more leaves" if len(long) > 3 else ""
    if all(_is_as_long(leaf, size) for _, _, leaf in named_leaves(args, numbers)):
        belongs = f"write batch_argnums={_shown(numbers | set(roles.batch_argnums))}"
    else:
        belongs = "give it to the loss in the batch, or in an argument that batch_argnums names"
    raise ArgumentError(
        f"arguments without a role have leaves that are as long as the batch of {size} examples: "
        f"{shown}. The loss of every single example would be given all of this. If it belongs to the "
        f"examples, {belongs}. If it is the same for all examples, and as long as the batch by chance, "
        f"write shared_argnums={_shown(numbers | set(roles.shared_argnums))}."
    )


def _refuse_key(path: str, n: int, leaf: Any, roles: Roles, argument: Any) -> NoReturn:
    if not is_one_key(leaf):
        own = "give the loss one key, name it in rng_argnums, and split it in the loss"
    elif all(is_one_key(x) for x in jax.tree.leaves(argument)):
        own = f"write rng_argnums={_shown({n, *roles.rng_argnums})}"
    else:
        own = "give the loss the key in an argument of its own, and name that in rng_argnums"
    shared = _shown({n, *roles.shared_argnums})
    raise ArgumentError(
        f"{path} is {a_key(leaf)}, and rng_argnums does not name it: all examples would draw the same "
        f"numbers, such as one dropout mask for all. To give each example a key of its own, {own}. If "
        f"all examples shall draw the same numbers, write shared_argnums={shared}."
    )


def refuse_key_in_batch(path: str, leaf: Any) -> None:
    """Refuses a single key among the examples, because it has no example axis."""
    if is_key(leaf) and leaf.shape == ():
        raise ArgumentError(
            f"the batch leaf {path} is {a_key(leaf)}, which has no example axis. Give the loss the "
            "batch and the key as two arguments, `loss(params, batch, key)`, and write rng_argnums=2: "
            "each example gets a key of its own."
        )


def is_number_like(x: Any) -> bool:
    """Whether this is an array, the shape of one, or a Python number."""
    return is_array_like(x) or isinstance(x, (int, float, complex))


def is_one_key(x: Any) -> bool:
    """Whether this can be a single PRNG key, typed or raw."""
    if not is_array_like(x):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return x.dtype == jnp.uint32 and x.ndim == 1


def is_key(x: Any) -> bool:
    """Whether this is an array of typed PRNG keys, or looks like a single raw key.

    A raw key is an array of uint32. An array with the shape of a raw key of the default implementation
    is taken for one, because hardly anything else consists of two numbers of uint32.
    """
    if not is_array_like(x):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    return x.dtype == jnp.uint32 and x.shape == jax.eval_shape(jax.random.PRNGKey, 0).shape


def kind(x: Any) -> str:
    """What `x` is, for messages."""
    if is_array_like(x):
        return f"an array of {x.dtype} with shape {x.shape}"
    return f"{x!r}, a {type(x).__name__}"


def parameters_of(argument: Any, number: int) -> str:
    """A sentence for messages: how to get the parameters out of the model object of a framework."""
    if hasattr(argument, "params"):
        return f" If only its parameters are to be differentiated, give the loss args[{number}].params."
    if any(base.__module__.split(".")[0] == "equinox" for base in type(argument).__mro__):
        return (
            " For a module of Equinox write `params, static = eqx.partition(model, "
            "eqx.is_inexact_array)`, give the loss params, and in the loss write "
            "`model = eqx.combine(params, static)`."
        )
    return ""


def refuse_modules(argument: Any, number: int) -> None:
    """Refuses modules of Flax NNX where parameters are expected.

    For `jax.tree` each of their variables is a leaf. So running statistics would count as parameters,
    and a variable that stands in two places as two parameters.
    """
    if any(map(_is_module_of_nnx, jax.tree.leaves(argument, is_leaf=_is_module_of_nnx))):
        raise ArgumentError(
            f"args[{number}], which argnums names, has a module of Flax NNX. All of its variables would "
            "be differentiated, also running statistics, and tied weights would be taken for separate "
            "ones. The functions of pergrad.nnx take modules: write `import pergrad.nnx`, and "
            "`pergrad.nnx.` in front of the function in place of `pergrad.`."
        )


def _is_module_of_nnx(x: Any) -> bool:
    return any((base.__module__, base.__name__) == NNX_MODULE for base in type(x).__mro__)


@contextlib.contextmanager
def saying_what_was_given(batch: Sequence[Any], request: Request) -> Iterator[None]:
    """Adds a note to an error of the loss itself: which `batch` the loss was given, one example."""
    try:
        yield
    except PergradError:
        raise
    except Exception as error:
        shapes = ", ".join(str(x.shape) for x in batch[:3]) + (", ..." if len(batch) > 3 else "")
        if request.keep_batch_dim:
            given = f"a batch of one example. Its leaves have the shapes {shapes}."
            way_out = (
                "If the loss takes an example without the axis in front, write keep_batch_dim=False."
            )
        else:
            given = f"one example, without an axis in front. Its leaves have the shapes {shapes}."
            way_out = "If the loss takes a batch, leave out keep_batch_dim=False."
        error.add_note(f"pergrad gave the loss {given} {way_out}")
        raise


def is_array_like(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_as_long(x: Any, size: int) -> bool:
    """Whether `x` is as long as the batch. For a batch of one example that would mean nothing."""
    return size > 1 and is_array_like(x) and tuple(x.shape[:1]) == (size,)


def a_key(x: Any) -> str:
    """What the key `x` is, for messages."""
    typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return f"{'a' if typed else 'a raw'} PRNG key ({kind(x)})"


def _name(fun: Any) -> str:
    name = getattr(fun, "__name__", "")
    return name if name.isidentifier() else "loss"


def _shown(numbers: Iterable[int]) -> str:
    """Argument numbers as users write them: one number, or a tuple."""
    first, *rest = sorted(numbers)
    return str((first, *rest) if rest else first)
