"""Gives the functions that users get back the name and signature of the loss, and a docstring."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pergrad._call.request import Request, takes_direction, takes_max_norm
from pergrad._errors import ArgumentError

_WEIGHTS = "one weight for each example, at least 0, read as a count. None: each counts once."


_DIRECTION = "a tree like the parameters, with which `Dot` takes inner products."


_MAX_NORM = "the largest norm for `ClippedMean`; a number, or one for each parameter or group."


def keywords_of(stats: Any) -> dict[str, str]:
    """The keywords of a function for these statistics, besides the loss's own, and their meanings."""
    keywords = {"example_weights": _WEIGHTS}
    if takes_direction(stats):
        keywords["direction"] = _DIRECTION
    if takes_max_norm(stats):
        keywords["max_norm"] = _MAX_NORM
    return keywords


def taken_from(kwargs: dict[str, Any], request: Request) -> dict[str, Any]:
    """Takes `direction` and `max_norm` out of a call's keywords, as far as statistics want them.

    If none wants a `max_norm` and the loss cannot take it, that is an error.
    """
    own = {name: kwargs.pop(name) for name in keywords_of(request.stats) if name in kwargs}
    parameters = _parameters(request.fun)
    if "max_norm" in kwargs and parameters is not None:
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if len(names) == len(parameters) and "max_norm" not in names:
            raise ArgumentError(
                "max_norm was given, but no statistic takes one, nor does the loss. Write "
                "pg.ClippedMean() without a number: it takes the max_norm of each call."
            )
    return own


def returning_stats(request: Request, *, with_value: bool = True) -> Callable[[Any], Any]:
    """A decorator for the function that returns statistics."""
    aux = request.has_aux
    if with_value:
        summary = "The value of the loss and statistics of its per-example gradients."
        lines = ["((value, aux), stats)" if aux else "(value, stats)"]
        lines.append("  value: the mean of the examples' losses, counted with their weights.")
    else:
        summary = "Statistics of the per-example gradients of the loss."
        lines = ["(stats, aux)" if aux else "stats"]
    if aux:
        lines.append("  aux: what the loss returns beside its value, with an example axis in front.")
    lines.append(f"  stats: the results of {request.stats!r}, in the same tree.")
    return _made_of(request.fun, summary, keywords_of(request.stats), "\n".join(lines))


def returning_plan(request: Request) -> Callable[[Any], Any]:
    """A decorator for the function that returns a plan."""
    summary = "The plan for the statistics of the per-example gradients of the loss. Nothing is run."
    returns = "a `pergrad.Plan`. Print it."
    return _made_of(request.fun, summary, keywords_of(request.stats), returns)


def returning_nothing(request: Request) -> Callable[[Any], Any]:
    """A decorator for the function that checks a loss."""
    summary = "Checks that the loss is a mean over examples that do not influence each other."
    returns = "None, or raises `pergrad.NotPerExampleError` if it is not."
    return _made_of(request.fun, summary, {}, returns)


def _made_of(
    fun: Callable[..., Any],
    summary: str,
    keywords: Mapping[str, str],
    returns: str,
) -> Callable[[Any], Any]:
    """A decorator for a function that takes the arguments of the loss `fun` and the `keywords`.

    The loss may be any callable. Partial applications and callable objects have no name and no docstring
    of their own. Those of the function inside, or of the class, are used in their place.
    """
    inner = _innermost(fun)
    name = getattr(inner, "__name__", type(inner).__name__)
    parameters = _parameters(fun)
    parts = [summary, _takes(name, parameters, keywords), f"Returns {returns}"]
    own_doc = (inner if inspect.isroutine(inner) else type(inner).__call__).__doc__
    if own_doc:
        own_doc = textwrap.indent(inspect.cleandoc(own_doc), "  ")
        parts.append(f"The docstring of `{name}`:\n\n{own_doc}")
    signature = _signature(parameters, keywords)

    def decorate(function: Any) -> Any:
        function.__signature__ = signature or inspect.signature(function)
        function.__name__ = name
        function.__qualname__ = getattr(inner, "__qualname__", name)
        function.__module__ = getattr(inner, "__module__", function.__module__)
        function.__doc__ = "\n\n".join(parts)
        function.__wrapped__ = fun
        return function

    return decorate


def _innermost(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The callable that is wrapped in decorators and partial applications."""
    while isinstance(inner := inspect.unwrap(fun), functools.partial):
        fun = inner.func
    return inner


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a callable, or None if Python does not know them."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return None


def _signature(
    parameters: list[inspect.Parameter] | None, keywords: Collection[str]
) -> inspect.Signature | None:
    """The loss's parameters, followed by the keywords.

    It is None if the parameters are not known, or if one of them has the name of a keyword.
    """
    if parameters is None or any(p.name in keywords for p in parameters):
        return None
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in keywords]
    others = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    return inspect.Signature([*others, *own, *parameters[len(others) :]])


def _takes(name: str, parameters: list[inspect.Parameter] | None, keywords: Mapping[str, str]) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = ", ".join(stars.get(p.kind, "") + p.name for p in parameters or ())
    head = f"Takes the arguments of `{name}`{f' ({names})' if names else ''}"
    if not keywords:
        return f"{head}."
    return "\n".join([f"{head} and by keyword:", *(f"  {k}: {what}" for k, what in keywords.items())])
