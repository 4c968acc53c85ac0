"""What a type checker says of calls: nothing of those that are right, and an error in the others.

`make lint` reads this file and nobody runs it. In every line that ends in `pyright: ignore` there is a
mistake. If pyright no longer sees it, it complains that there is nothing to ignore.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any

import jax.numpy as jnp
import optax

import pergrad as pg
import pergrad.nnx


def loss(params: Any, batch: Any) -> Any: ...


STATS = {"mean": pg.Mean(), "square": pg.Mean(jnp.square, per=4)}

# Right.

pg.value_and_stats(loss, STATS, (0, 1), batch_argnums=[2, 3], has_aux=True, keep_batch_dim=False)
pg.grad_stats(loss, STATS, rng_argnums=2, microbatch_size="auto", spmd_axis_name=("data", "model"))
pg.explain(loss, STATS, microbatch_size=8, strategy="streamed:8")
pg.check(loss, rtol=1e-3, microbatch_size=None, strategy="materialise")
pergrad.nnx.value_and_stats(loss, STATS, wrt=lambda path, x: True, microbatch_size="auto")
pergrad.nnx.explain(loss, STATS, batch_argnums=(1, 2))
pergrad.nnx.check(loss, 0, has_aux=True, rtol=1e-3)
print(pg.explain(loss, STATS)(0, 1).rows[0].path)
print(pg.Variance(per="token"), pg.Norm("leaf", per="token"), pg.ClippedMean(1.0, by="all"))
print(pg.ClippedMean(by=lambda path: path[:3]), pg.WeightedMean(jnp.tanh, jnp.square, by="leaf"))
print(pg.Dot(per="token"), pg.Project(512, 0, where=lambda path: True))
pg.value_and_stats(loss, STATS, nonfinite="drop")
pg.gram(loss, centre=True, batch_argnums=(1, 2), microbatch_size=None)
pg.optim.clip_examples(optax.sgd(1e-3), 1.0, by="leaf")
pg.optim.scale_by_sign(of="examples")
pg.scaling.move({}, 8, 16, "linear")
pg.scaling.batch_size({}, 8, [8, 16], "adascale")

# A name that does not exist.

pg.value_and_stats(loss, STATS, batch_argnum=1)  # pyright: ignore[reportCallIssue]
pg.grad_stats(loss, STATS, microbatchsize=1)  # pyright: ignore[reportCallIssue]
pg.explain(loss, STATS, strateg="summed")  # pyright: ignore[reportCallIssue]
pg.check(loss, hasaux=True)  # pyright: ignore[reportCallIssue]
pergrad.nnx.value_and_stats(loss, STATS, with_respect_to=None)  # pyright: ignore[reportCallIssue]
pergrad.nnx.explain(loss, STATS, batch_argnum=1)  # pyright: ignore[reportCallIssue]
pergrad.nnx.check(loss, tol=1e-3)  # pyright: ignore[reportCallIssue]

# A word that does not exist.

pg.value_and_stats(loss, STATS, microbatch_size="automatic")  # pyright: ignore[reportArgumentType]
pg.grad_stats(loss, STATS, microbatch_size=0.5)  # pyright: ignore[reportArgumentType]
pg.explain(loss, STATS, batch_argnums="batch")  # pyright: ignore[reportArgumentType]
pg.check(loss, keep_batch_dim="no")  # pyright: ignore[reportArgumentType]
pergrad.nnx.value_and_stats(loss, STATS, microbatch_size="all")  # pyright: ignore[reportArgumentType]
pg.Mean(per="group")  # pyright: ignore[reportArgumentType]
pg.Variance(per="tokens")  # pyright: ignore[reportArgumentType]
pg.Norm("leaves")  # pyright: ignore[reportArgumentType]
pg.Dot(per="group")  # pyright: ignore[reportArgumentType]
pg.ClippedMean(1.0, "each")  # pyright: ignore[reportArgumentType]
pg.WeightedMean(jnp.tanh, by="each")  # pyright: ignore[reportArgumentType]
pg.explain(loss, STATS, nonfinite="skip")  # pyright: ignore[reportArgumentType]
pg.optim.clip_examples(optax.sgd(1e-3), 1.0, by="each")  # pyright: ignore[reportArgumentType]
pg.optim.scale_by_sign(of="signs")  # pyright: ignore[reportArgumentType]
pg.scaling.move({}, 8, 16, "square root")  # pyright: ignore[reportArgumentType]
pg.scaling.batch_size({}, 8, [8, 16], "gain")  # pyright: ignore[reportArgumentType]

# An argument by place that has a name alone.

pg.value_and_stats(loss, STATS, 0, 1)  # pyright: ignore[reportCallIssue]
pg.grad_stats(loss, STATS, 0, 1)  # pyright: ignore[reportCallIssue]
pg.explain(loss, STATS, 0, 1)  # pyright: ignore[reportCallIssue]
pg.check(loss, 0, 1e-3)  # pyright: ignore[reportCallIssue]
