"""Per-example gradients in PyTorch: what BackPACK, Opacus and torch.func cost beside its plain gradient.

    python -m pergrad.lab.bench.torch_side_by_side --cases mlp --out bench/torch.json

Every candidate returns the mean loss and the statistics of its task. Before anything is timed, they are
compared with those of `torch.func.vmap(grad)`. A candidate that raises an error is left out, and the
error is logged. The rows are those of `pergrad bench` (see `pergrad.lab.bench.run`).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.metadata
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backpack
import torch
from backpack import extensions
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from rich.console import Console
from torch import Tensor, nn
from torch.func import functional_call

from pergrad.lab import timing
from pergrad.lab.bench import price, run, tables, torch_models
from pergrad.lab.bench.cases import CASES
from pergrad.lab.bench.tasks import MAX_NORM
from pergrad.lab.errors import LabError

FLOOR, VMAP = "torch backward", "torch.func vmap(grad)"
VERSIONED = ("torch", "backpack-for-pytorch", "opacus")
RTOL = 1e-3  # in the norm of any one parameter's statistic, in float32; Opacus adds 1e-6 to norms
LONG, WIDE = CASES["transformer_long"], CASES["transformer_wide"]
MODELS: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
    "mlp": (CASES["mlp"], lambda: torch_models.MLP(CASES["mlp"])),
    "cnn": (CASES["cnn"], lambda: torch_models.CNN(CASES["cnn"])),
    "transformer_long": (LONG, lambda: torch_models.Transformer(LONG)),
    "transformer_wide": (WIDE, lambda: torch_models.Transformer(WIDE)),
    "transformer_long, no norms": (LONG, lambda: torch_models.Transformer(LONG, has_norms=False)),
    "transformer_wide, no norms": (WIDE, lambda: torch_models.Transformer(WIDE, has_norms=False)),
}

Statistics = dict[str, list[Tensor]]  # each a tensor for every parameter, or one alone
Run = Callable[[], tuple[Tensor, Statistics]]


@dataclasses.dataclass
class TorchWorkload:
    """A model with a batch; `losses` are those of the examples, [B]."""

    model: Any
    inputs: Tensor
    targets: Tensor

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.model.parameters())

    def losses(self, model: nn.Module) -> Tensor:
        return self.model.losses(model(self.inputs), self.targets)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters]


# The candidates. Each is made of a workload of its own, since BackPACK and Opacus change the model.


def backward(workload: TorchWorkload) -> Run:
    """The mean gradient alone, which everybody pays for anyway."""

    def once() -> tuple[Tensor, Statistics]:
        workload.model.zero_grad()
        value = workload.losses(workload.model).mean()
        value.backward()
        return value.detach(), {"mean": workload.gradients()}

    return once


def vmap_grad(workload: TorchWorkload, reduce: Callable[[list[Tensor]], Statistics]) -> Run:
    """All gradients at once, then reduced."""
    parameters = {name: p.detach() for name, p in workload.model.named_parameters()}

    def loss(parameters: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(workload.model, parameters, (inputs[None],))
        return workload.model.losses(outputs, target[None])[0]

    of_each = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0, 0))

    def once() -> tuple[Tensor, Statistics]:
        gradients, values = of_each(parameters, workload.inputs, workload.targets)
        return values.mean(), reduce(list(gradients.values()))

    return once


def by_backpack(
    workload: TorchWorkload, extension: Any, read: Callable[[TorchWorkload], Statistics]
) -> Run:
    model = backpack.extend(workload.model)

    def once() -> tuple[Tensor, Statistics]:
        model.zero_grad()
        value = workload.losses(model).mean()
        with backpack.backpack(extension()):
            value.backward()
        return value.detach(), {"mean": workload.gradients()} | read(workload)

    return once


def by_opacus(workload: TorchWorkload, reduce: Callable[[list[Tensor]], Statistics]) -> Run:
    """All gradients at once, made by hooks on the layers, then reduced."""
    model = GradSampleModule(workload.model, loss_reduction="mean")

    def once() -> tuple[Tensor, Statistics]:
        model.zero_grad()
        value = workload.losses(model).mean()
        value.backward()
        return value.detach(), reduce([p.grad_sample for p in workload.parameters])  # type: ignore

    return once


def by_ghost_clipping(workload: TorchWorkload) -> Run:
    """Opacus' own two passes: norms from the factors of gradients, then a second backward pass."""
    model = GradSampleModuleFastGradientClipping(
        workload.model, max_grad_norm=MAX_NORM, use_ghost_clipping=True, loss_reduction="mean"
    )

    def once() -> tuple[Tensor, Statistics]:
        model.zero_grad()
        losses = workload.losses(model)
        losses.mean().backward(retain_graph=True)
        model.zero_grad()
        scale = model.get_clipping_coef()
        model.disable_hooks()
        (scale * losses).mean().backward()
        model.enable_hooks()
        return losses.mean().detach(), {"clipped": workload.gradients()}

    return once


# The statistics, from all gradients, leaves [B, ...].


def mean_and_square(g: list[Tensor]) -> Statistics:
    return {"mean": [x.mean(0) for x in g], "second_moment": [x.square().mean(0) for x in g]}


def mean_and_variance(g: list[Tensor]) -> Statistics:
    return {"mean": [x.mean(0) for x in g], "variance": [x.var(0, correction=1) for x in g]}


def norms(g: list[Tensor]) -> Statistics:
    return {"norm": [_norm([x.flatten(1).norm(dim=1) for x in g])]}


def clipped(g: list[Tensor]) -> Statistics:
    (norm,) = norms(g)["norm"]
    scale = (MAX_NORM / norm).clamp(max=1)
    return {"clipped": [torch.tensordot(scale, x, 1) / len(x) for x in g]}


def _norm(of_parameters: list[Tensor]) -> Tensor:
    return torch.stack(of_parameters).norm(dim=0)


# The statistics as BackPACK leaves them. Its gradients of a mean over B examples are g / B.


def backpack_square(workload: TorchWorkload) -> Statistics:
    B = len(workload.inputs)
    return {"second_moment": [B * p.sum_grad_squared for p in workload.parameters]}  # type: ignore


def backpack_variance(workload: TorchWorkload) -> Statistics:
    """Its variance is that of a whole population, without the -1."""
    B = len(workload.inputs)
    return {"variance": [B**2 * B / (B - 1) * p.variance for p in workload.parameters]}  # type: ignore


def backpack_norms(workload: TorchWorkload) -> Statistics:
    squares = [p.batch_l2 for p in workload.parameters]  # type: ignore
    return {"norm": [len(workload.inputs) * torch.stack(squares).sum(0).sqrt()]}


TASKS: dict[str, dict[str, Callable[[TorchWorkload], Run]]] = {
    "moments": {
        VMAP: lambda workload: vmap_grad(workload, mean_and_square),
        "BackPACK SumGradSquared": lambda workload: by_backpack(
            workload, extensions.SumGradSquared, backpack_square
        ),
        "Opacus hooks": lambda workload: by_opacus(workload, mean_and_square),
    },
    "variance": {
        VMAP: lambda workload: vmap_grad(workload, mean_and_variance),
        "BackPACK Variance": lambda workload: by_backpack(
            workload, extensions.Variance, backpack_variance
        ),
        "Opacus hooks": lambda workload: by_opacus(workload, mean_and_variance),
    },
    "norms": {
        VMAP: lambda workload: vmap_grad(workload, norms),
        "BackPACK BatchL2Grad": lambda workload: by_backpack(
            workload, extensions.BatchL2Grad, backpack_norms
        ),
        "Opacus hooks": lambda workload: by_opacus(workload, norms),
    },
    "clipped": {
        VMAP: lambda workload: vmap_grad(workload, clipped),
        "Opacus hooks": lambda workload: by_opacus(workload, clipped),
        "Opacus ghost clipping": by_ghost_clipping,
    },
}


def build(case: str, task: str) -> tuple[dict[str, Run], dict[str, str]]:
    """Candidates that agree with `vmap(grad)`, the floor first, and why others are left out."""
    torch.manual_seed(0)
    shape, make = MODELS[case]
    model = make()
    data = model.sample(shape)  # type: ignore[operator]
    every = {FLOOR: backward} | TASKS[task]
    expected = every[VMAP](TorchWorkload(copy.deepcopy(model), *data))()
    candidates, left_out = {}, {}
    for name, of in every.items():
        try:
            candidate = of(TorchWorkload(copy.deepcopy(model), *data))
            found = candidate()
        except Exception as error:  # the package's own words
            left_out[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        difference = largest_difference(found, expected)
        if not difference <= RTOL:
            raise LabError(f"{case}, {task}: {name} differs from {VMAP} by {difference:.1e}.")
        candidates[name] = candidate
    return candidates, left_out


def largest_difference(found: tuple[Tensor, Statistics], expected: tuple[Tensor, Statistics]) -> float:
    """The largest norm of a difference, relative to the norm of what is expected."""
    shared = found[1].keys() & expected[1].keys()
    pairs = [(found[0], expected[0])]
    for name in shared:
        pairs += zip(found[1][name], expected[1][name], strict=True)
    return max(float((x - y).norm() / (y.norm() or 1)) for x, y in pairs)


def measure(item: run.Item, settings: run.Settings) -> list[run.Row]:
    """The rows of one comparison."""
    candidates, left_out = build(item.case, item.task)
    unknown = (math.nan, math.nan, math.nan)  # nothing is compiled, and memory is not measured
    executables = {
        name: timing.Executable(candidate, *unknown) for name, candidate in candidates.items()
    }
    results = timing.time_all(executables, rounds=settings.rounds, budget=settings.budget)
    shape = {"model": type(MODELS[item.case][0]).__name__, **dataclasses.asdict(MODELS[item.case][0])}
    head = {**dataclasses.asdict(item), "model": shape}
    rows = [{**head, **numbers} for numbers in price.numbers(results)]
    rows += [{**head, "candidate": name, "left_out": why} for name, why in left_out.items()]
    tables.show(Console(), str(item), rows, tables.RUNS)
    return rows


def about(settings: run.Settings) -> dict[str, Any]:
    """As `run.about`, of PyTorch."""
    found = run.about(settings)
    versions = {name: importlib.metadata.version(name) for name in VERSIONED}
    machine = found["machine"] | {"threads": torch.get_num_threads()}
    return found | {"versions": found["versions"] | versions, "machine": machine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=10, help="timed runs of each candidate")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a candidate may take")
    parser.add_argument("--out", type=Path, default=Path("bench/torch.json"), metavar="FILE")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")  # of hooks and of missing batching rules, which every call gives
    # BackPACK only warns of a layer that it has no rule for, and leaves its parameters out.
    warnings.filterwarnings("error", r"Extension saving .*torch\.nn\.modules\.(?!container)")
    settings = run.Settings(asked.rounds, asked.budget, peak=())
    wanted = [run.Item("torch", case, task) for case in asked.cases for task in asked.tasks]
    run.run(wanted, lambda item: measure(item, settings), about(settings), asked.out)


if __name__ == "__main__":
    main()
