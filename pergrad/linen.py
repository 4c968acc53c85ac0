"""For Flax linen: a `TrainState` that hands statistics on to its optimizer.

`apply_gradients` of Flax's own `TrainState` hands on the gradient and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import optax
from flax.training import train_state


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, whose `apply_gradients` also takes `stats`.

    >>> state = TrainState.create(
    ...     apply_fn=None, params=jnp.array([1.0, 1.0]), tx=pg.optim.micro_adam(0.5)
    ... )
    >>> loss = lambda params, x: jnp.mean(x @ params)
    >>> value, stats = pg.value_and_stats(loss, state.tx.stats)(state.params, jnp.eye(2))
    >>> state = state.apply_gradients(grads=stats["mean"], stats=stats)
    >>> state.step, jnp.round(state.params, 3)  # 1 - 0.5 * 0.5 / sqrt(0.5)
    (1, Array([0.646, 0.646], dtype=float32))
    """

    def apply_gradients(
        self, *, grads: Any, stats: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """The state after one more step.

        Args:
          grads: the gradient, `stats["mean"]`.
          stats: the statistics of the same call, those of `tx.stats` or more. An optimizer of optax
            does without. If it is None, this is Flax's own `apply_gradients`.
          **kwargs: other fields of the state to replace, as in Flax.
        """
        if stats is None:
            return super().apply_gradients(grads=grads, **kwargs)
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(grads, self.opt_state, self.params, stats=stats)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)
