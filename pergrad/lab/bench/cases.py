"""The list of models that are measured, the tasks for each, and how one model grows."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, cast, get_args

import jax

from pergrad.lab.bench.image_models import CNN, BottleneckResNet, ResNet
from pergrad.lab.bench.models import (
    LSTM,
    MLP,
    FlaxTransformer,
    MixtureOfExperts,
    Model,
    Transformer,
)
from pergrad.lab.bench.tasks import TASKS, Loss, Task, Tree, of_one_position
from pergrad.lab.config import CaseName, LargeName, TaskName
from pergrad.lab.errors import LabError

CASES: dict[CaseName, Model] = {
    "mlp": MLP(batch=128, width=1024, layers=4),
    "cnn": CNN(batch=64, size=32, widths=(32, 64, 64), strides=(1, 2, 2), classes=10),
    "resnet": ResNet(batch=32, size=32, widths=(32, 64, 128), blocks=2, classes=10),
    "lstm": LSTM(batch=32, length=64, width=256, vocab=256),
    "transformer_long": Transformer(batch=8, length=256, width=256, layers=4, vocab=1024),
    "transformer_wide": Transformer(batch=32, length=64, width=512, layers=2, vocab=1024),
    "transformer_vocab": Transformer(batch=16, length=128, width=256, layers=4, vocab=8192),
    "transformer_tied": Transformer(batch=16, length=128, width=256, layers=4, vocab=4096, tied=True),
    "transformer_scanned": Transformer(
        batch=8, length=128, width=256, layers=6, vocab=1024, tied=True, scanned=True
    ),
    "experts": MixtureOfExperts(
        batch=8, length=128, width=256, layers=2, vocab=1024, experts=8, hidden=512, dispatch="einsum"
    ),
    "flax": FlaxTransformer(batch=16, length=128, width=256, layers=4, vocab=256),
}
# Models that are only compiled, for chips (see `target`).
GPT = Transformer(batch=8, length=1024, width=768, layers=12, vocab=32768)
LARGE: dict[LargeName, Model] = {
    "large_mlp": MLP(batch=512, width=4096, layers=4),
    "large_resnet": BottleneckResNet(
        batch=64, size=224, widths=(256, 512, 1024, 2048), blocks=(3, 4, 6, 3), classes=1000
    ),
    "large_lstm": LSTM(batch=64, length=512, width=1024, vocab=1024),
    "large_experts": MixtureOfExperts(
        batch=8, length=1024, width=768, layers=4, vocab=32768, experts=8, hidden=1536, dispatch="einsum"
    ),
    "large_two_layers": dataclasses.replace(GPT, layers=2),
    "large_transformer": GPT,
    "large_transformer_small_vocab": dataclasses.replace(GPT, vocab=1024),
    "large_transformer_scanned": dataclasses.replace(GPT, scanned=True),
    "billion": Transformer(batch=8, length=2048, width=2048, layers=22, vocab=32768, scanned=True),
}
LARGE_TITLES: dict[LargeName, str] = {
    "large_mlp": "MLP, B512, 4 x 4096",
    "large_resnet": "bottleneck ResNet, group norm, B64, 224x224",
    "large_lstm": "LSTM, B64 T512 D1024",
    "large_experts": "mixture of 8 experts, B8 T1024 D768 L4 V32768",
    "large_two_layers": "transformer, B8 T1024 D768 L2 V32768",
    "large_transformer": "transformer, B8 T1024 D768 L12 V32768",
    "large_transformer_small_vocab": "transformer, B8 T1024 D768 L12 V1024",
    "large_transformer_scanned": "transformer, scanned, remat, B8 T1024 D768 L12 V32768",
    "billion": "transformer, scanned, remat, B8 T2048 D2048 L22 V32768",
}
# What large models are compiled for by default.
LARGE_TASKS: tuple[TaskName, ...] = ("moments", "clipped")
TITLES: dict[CaseName, str] = {
    "mlp": "MLP, B128, 4 x 1024",
    "cnn": "CNN, B64, 32x32, 3-32-64-64",
    "resnet": "ResNet, group norm, B32, 32x32",
    "lstm": "LSTM, B32 T64 D256",
    "transformer_long": "transformer, B8 T256 D256 L4 V1024",
    "transformer_wide": "transformer, B32 T64 D512 L2 V1024",
    "transformer_vocab": "transformer, B16 T128 D256 L4 V8192",
    "transformer_tied": "transformer, tied, B16 T128 D256 L4 V4096",
    "transformer_scanned": "transformer, scanned, remat, tied, B8 T128 D256 L6",
    "experts": "mixture of 8 experts, B8 T128 D256 L2",
    "flax": "Flax NNX transformer, B16 T128 D256 L4 V256",
}
EVERY_TITLE: dict[str, str] = {**TITLES, **LARGE_TITLES}
# What is measured by default: two tasks on all models, the other tasks on the models that differ most.
DIFFERENT: tuple[CaseName, ...] = ("mlp", "cnn", "lstm", "transformer_long", "transformer_wide")
USUAL: dict[TaskName, tuple[CaseName, ...]] = {
    "moments": get_args(CaseName),
    "clipped": get_args(CaseName),
    "norms": DIFFERENT,
    "five": DIFFERENT,
    "tokens": DIFFERENT,
}

# A small transformer, of which one size at a time grows.
SMALL = Transformer(batch=8, length=64, width=128, layers=2, vocab=1024)
GROWTH: dict[str, tuple[str, tuple[int, ...]]] = {
    "B": ("batch", (2, 8, 32, 128)),
    "T": ("length", (16, 64, 256, 1024)),
    "D": ("width", (64, 128, 256, 512)),
    "V": ("vocab", (256, 1024, 4096, 16384)),
}
COMPILED: dict[str, tuple[str, tuple[int, ...]]] = {
    "L": ("layers", (1, 2, 4, 8, 16)),
    "B": ("batch", (2, 8, 32, 128, 512)),
}


WANTED = "It takes no arguments and returns three things: `return loss, params, batch`."


@dataclass(frozen=True)
class Workload:
    """What is measured: a loss with its arguments, and its description for the log, `about`."""

    loss: Loss
    params: Tree
    batch: Any
    about: Mapping[str, Any]
    has_one_position: bool = False

    def task(self, name: str) -> Task:
        task = TASKS[cast(TaskName, name)]
        return of_one_position(task) if self.has_one_position else task


def of_model(model: Model) -> Workload:
    """A model with random parameters and a random batch, which are the same every time."""
    return _workload(model, model.init(jax.random.key(0)), model.sample(jax.random.key(1)))


def abstract_of_model(model: Model) -> Workload:
    """A model as users run it on a chip, with shapes and types in place of parameters and batch.

    Nothing is allocated. Products are those of bfloat16, and parameters stay float32.
    """
    model = dataclasses.replace(model, compute="bfloat16")
    params, batch = (jax.eval_shape(f, jax.random.key(0)) for f in (model.init, model.sample))
    return _workload(model, params, batch)


def _workload(model: Model, params: Tree, batch: Any) -> Workload:
    about = {"model": type(model).__name__, **dataclasses.asdict(model), "parameters": _count(params)}
    return Workload(model.loss, params, batch, about, has_one_position=isinstance(model, MLP))


def workload(name: str) -> Workload:
    """One of `CASES`, or a user's own: `MODULE:FUNCTION` returns a loss, its parameters and a batch."""
    return of_model(CASES[cast(CaseName, name)]) if name in CASES else _own(name)


def abstract(name: str) -> Workload:
    """One of `CASES` or `LARGE`, or a user's own, with shapes and types in place of arrays."""
    models: dict[str, Model] = {**CASES, **LARGE}
    if name in models:
        return abstract_of_model(models[name])
    own = _own(name)
    params, batch = jax.eval_shape(lambda args: args, (own.params, own.batch))
    return dataclasses.replace(own, params=params, batch=batch)


def _own(name: str) -> Workload:
    loss, params, batch = example(name)
    return Workload(loss, params, batch, {"model": name, "parameters": _count(params)})


def grown(model: Transformer, field: str, size: int) -> Transformer:
    return dataclasses.replace(model, **{field: size})


def example(name: str) -> tuple[Loss, Tree, Any]:
    """What the function `MODULE:FUNCTION` returns; its module may be in the current directory."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise LabError(f"{name!r} is not MODULE:FUNCTION, such as my_project.model:example.")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise LabError(f"{name} cannot be loaded: {error}.") from error
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise LabError(f"{name} is a {type(function).__name__}, not a function. {WANTED}")
    if unfilled := [p.name for p in signature(function).parameters.values() if _is_required(p)]:
        raise LabError(
            f"{name} has arguments ({', '.join(unfilled)}), and is called with none. {WANTED}"
        )
    found = function()
    if not isinstance(found, tuple | list) or len(found) != 3 or not callable(found[0]):
        raise LabError(f"{name} returns {_described(found)}. {WANTED}")
    loss, params, batch = cast(tuple[Loss, Tree, Any], found)
    return loss, params, batch


def _is_required(parameter: Parameter) -> bool:
    optional = parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD
    return parameter.default is parameter.empty and parameter.kind not in optional


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"{len(x)} things ({', '.join(type(entry).__name__ for entry in x)})"
    return f"one thing ({type(x).__name__})"


def _count(params: Tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
