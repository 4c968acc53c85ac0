"""Inner products of the gradients of all examples of one set with all of another, block by block.

A set of examples is divided into blocks. The factors of a block's gradients are made by the backbone,
as for any statistic, and two blocks meet in the inner products of their gradients, which strategies
compute from the factors where that is cheaper. Then the factors of one of them are forgotten:

    for every block of a:          its factors
        for every block of b:      its factors, and the inner products of both

So a block of a goes through the model once, and a block of b as often as there are blocks of a, unless b
is one block. In the matrix of one set with itself, only one of the blocks (i, j) and (j, i) is computed:
with n blocks, block i meets itself and the blocks i + 1, ..., i + n/2, counted around the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pergrad import _compat
from pergrad._call.call import Call
from pergrad._call.request import ArgNums, MicrobatchSize, Request, StrategyName
from pergrad._call.wrap import returning_gram
from pergrad._cut import Cut
from pergrad._errors import ArgumentError
from pergrad._ir import backend
from pergrad._plan import Schedule, bytes_of_two
from pergrad._run import Block, inner_products, run
from pergrad._statistics import Gram, Where, added_up

# The share of the device's memory that two blocks may take.
BLOCKS_SHARE = 0.1


def gram(
    fun: Callable[..., Any],
    *,
    where: Where | None = None,
    centre: bool = False,
    argnums: ArgNums = 0,
    batch_argnums: ArgNums = 1,
    has_aux: bool = False,
    keep_batch_dim: bool = True,
    rng_argnums: ArgNums = (),
    shared_argnums: ArgNums = (),
    microbatch_size: MicrobatchSize = "auto",
    strategy: StrategyName = "auto",
) -> Callable[..., Any]:
    """Turns a loss into a function that returns inner products of the gradients of all examples.

    `gram_fn(params, a, b)` returns `<g_i, g_j>` for every example i of `a` and every example j of `b`,
    an array [A, B]. Without `b` it is the matrix of `a` with itself, [A, A], of which each half is
    computed once. This is the empirical neural tangent kernel of a loss, the influence of training
    examples on validation examples, or the matrix that minSR solves with. Gradients are never stored for
    more than a block of examples, and mostly not formed at all: a block needs memory for its inputs
    and residuals, and the whole needs memory for its result.

    Args:
      fun: the loss of `value_and_stats`. The gradients are those of its value for one example.
      where: a function of a parameter's path, as in `Norm`. Only the parameters for which it returns
        True are used.
      centre: whether gradients are centred: `<g_i - mean_a, g_j - mean_b>`, with the mean of each set.
        The means of the rows and the columns are taken away from the finished matrix. The error of that
        is relative to the largest inner product before.
      argnums: as in `value_and_stats`.
      batch_argnums: as in `value_and_stats`.
      has_aux: as in `value_and_stats`. `aux` is dropped.
      keep_batch_dim: as in `value_and_stats`.
      rng_argnums: as in `value_and_stats`. Example i of A gets `jax.random.split(key, A)[i]`, and
        example j of B gets `jax.random.split(key, B)[j]`.
      shared_argnums: as in `value_and_stats`.
      microbatch_size: how many examples of each set make up a block: `"auto"` for as many as fit into a
        tenth of the device's memory, None for all, or a number. Any size gives the same result. If both
        sets have several blocks, every block of `b` goes through the model once for every block of `a`.
      strategy: as in `value_and_stats`. `pg.explain(fun, pg.Gram())` shows the plan of a block.

    Returns:
      A function with `fun`'s arguments, with `a` in the place of the batch. `b` follows after all
      arguments of `fun`, or is given by keyword. If `batch_argnums` has several numbers, `b` is a tuple
      of as many arguments. The result has float32, for float64 parameters float64. The function can be
      jitted, and mapped over devices: `jax.shard_map` over the examples of `a`, with `check_vma=False`,
      gives each device its rows.

    >>> loss = lambda w, x: jnp.mean(x @ w)
    >>> a, b = jnp.array([[1.0, 0.0], [3.0, 4.0]]), jnp.array([[2.0, 1.0]])
    >>> pg.gram(loss)(jnp.ones(2), a)
    Array([[ 1.,  3.],
           [ 3., 25.]], dtype=float32)
    >>> pg.gram(loss)(jnp.ones(2), a, b)
    Array([[ 2.],
           [10.]], dtype=float32)
    """
    request = Request(
        fun,
        Gram(where),
        argnums,
        batch_argnums=batch_argnums,
        has_aux=has_aux,
        keep_batch_dim=keep_batch_dim,
        rng_argnums=rng_argnums,
        shared_argnums=shared_argnums,
        microbatch_size=microbatch_size,
        strategy=strategy,
    )

    @returning_gram(request)
    def gram_fn(*args: Any, b: Any = None, **kwargs: Any) -> jax.Array:
        args, b = _with_others(fun, args, kwargs, b)
        call = Call(request, args, kwargs)
        others = None if b is None else _call_of_others(call, b)
        with _compat.newer_jax_explained():
            result = _Blocks(call, others).inner_products()
        return _centred(result) if centre else result

    return gram_fn


def _with_others(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], b: Any
) -> tuple[tuple[Any, ...], Any]:
    """The arguments of the loss, and `b`: the last argument if the loss does not take so many."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return args, b

    def takes(args: tuple[Any, ...]) -> bool:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    is_last = b is None and args and not takes(args) and takes(args[:-1])
    return (args[:-1], args[-1]) if is_last else (args, b)


def _call_of_others(call: Call, b: Any) -> Call:
    """The call of the examples `b`, whose other arguments are those of `call`."""
    numbers = call.roles.batch_argnums
    several = not isinstance(call.request.batch_argnums, int)
    if several and not (isinstance(b, (tuple, list)) and len(b) == len(numbers)):
        raise ArgumentError(
            "b must be a tuple of arguments, one for each of "
            f"batch_argnums={call.request.batch_argnums}."
        )
    args = list(call.args)
    for number, arg in zip(numbers, b if several else (b,), strict=True):
        args[number] = arg
    others = Call(call.request, args, call.kwargs)
    own, theirs = ([(x.shape[1:], x.dtype) for x in c.batch] for c in (call, others))
    if call.batch_tree != others.batch_tree or own != theirs:
        raise ArgumentError(
            "the examples of b must be like those of a, in the same tree, with the same shapes and "
            f"dtypes. a: {call.batch_tree}, {own}; b: {others.batch_tree}, {theirs}."
        )
    return others


def _centred(x: jax.Array) -> jax.Array:
    """<g_i - mean_a, g_j - mean_b>, from the inner products of gradients that are not centred."""
    x = x - jnp.mean(x, axis=1, keepdims=True)
    return x - jnp.mean(x, axis=0, keepdims=True)


class _Blocks:
    """The examples of one or two calls, in blocks, and the program that runs for each block."""

    def __init__(self, a: Call, b: Call | None) -> None:
        self.call = a
        self.most = max(a.size, b.size if b else 0)
        self.cut, self.schedule = self._planned()
        self.size = self.schedule.batch_size
        self.a, self.b = self._divided(a), None if b is None else self._divided(b)
        self.shape = a.size, b.size if b else a.size

    def _planned(self) -> tuple[Cut, Schedule]:
        """The cut and the schedule of a block, with as many examples as fit or were asked for."""
        call, asked = self.call, self.call.request.microbatch_size
        program = call.traced()
        size = min(self.most, asked) if isinstance(asked, int) else self.most
        room = BLOCKS_SHARE * backend.backend().memory
        while True:
            cut, schedule = call.scheduled(program, size)
            if asked != "auto" or size == 1 or bytes_of_two(schedule, cut) <= room:
                return cut, schedule
            size = -(-size // 2)

    def _divided(self, call: Call) -> list[jax.Array]:
        """The examples of a call, with leaves [blocks, size, ...]. The first fill up the last block."""
        size = min(self.size, call.size)
        blocks = -(-call.size // size)
        places = np.arange(blocks * size) % call.size
        xs = call.examples()
        xs = xs if blocks * size == call.size else [x[places] for x in xs]
        return [x.reshape(blocks, size, *x.shape[1:]) for x in xs]

    def inner_products(self) -> jax.Array:
        """The inner products [A, B] of all examples."""
        rows, columns = self.shape
        blocks = self._of_one_set() if self.b is None else self._of_two_sets(self.a, self.b)
        n, k, *sizes = blocks.shape
        return blocks.transpose(0, 2, 1, 3).reshape(n * sizes[0], k * sizes[1])[:rows, :columns]

    def _of_two_sets(self, a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
        """The inner products of all pairs of blocks, [blocks of a, blocks of b, size, size]."""
        whole = self._factors([x[0] for x in b]) if len(b[0]) == 1 else None

        def row(examples: Sequence[jax.Array]) -> jax.Array:
            own = self._factors(examples)
            if whole is not None:
                return self._products(own, whole)[None]
            return lax.map(lambda others: self._products(own, self._factors(others)), b)

        return _over_blocks(row, a)

    def _of_one_set(self) -> jax.Array:
        """The inner products of all pairs of blocks of `a`, [blocks, blocks, size, size]."""
        a, n = self.a, len(self.a[0])
        further = np.arange(1, n // 2 + 1)

        def row(number_and_examples: Any) -> jax.Array:
            number, examples = number_and_examples
            own = self._factors(examples)
            with_itself = self._products(own, None)[None]
            if n == 1:
                return with_itself

            def with_other(distance: jax.Array) -> jax.Array:
                place = (number + distance) % n
                others = [lax.dynamic_index_in_dim(x, place, keepdims=False) for x in a]
                return self._products(own, self._factors(others))

            return jnp.concatenate([with_itself, lax.map(with_other, jnp.asarray(further))])

        found = _over_blocks(row, (jnp.arange(n), a))
        # Block (i, j) was found in row i, at the distance from i to j, or in row j, turned around.
        i, j = np.indices((n, n))
        turned = (j - i) % n > n // 2
        rows, distances = np.where(turned, j, i), np.where(turned, i - j, j - i) % n
        blocks = found[rows, distances]
        return jnp.where(turned[:, :, None, None], jnp.swapaxes(blocks, 2, 3), blocks)

    def _factors(self, examples: Sequence[jax.Array]) -> Block:
        """The factors of the gradients of one block."""
        size = len(examples[0])
        outcome = run(self.cut, self.schedule, self.call.params, examples, 1 / size)
        return Block(size, outcome.factors)

    def _products(self, a: Block, b: Block | None) -> jax.Array:
        """The inner products of the gradients of two blocks, or of one block with itself."""
        call = self.call
        found = inner_products(self.cut, self.schedule, call.params, a, b)
        selects = call.request.stats.selects
        return added_up([x for (param, _), x in found.items() if selects(call.paths[param])])


def _over_blocks(f: Callable[[Any], jax.Array], blocks: Any) -> jax.Array:
    """The results of `f` for each block; `blocks` is a tree of arrays [blocks, ...]."""
    if len(jax.tree.leaves(blocks)[0]) == 1:
        return f(jax.tree.map(lambda x: x[0], blocks))[None]
    return lax.map(f, blocks)
