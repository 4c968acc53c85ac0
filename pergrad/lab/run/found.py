"""Runs as others find them on disk: where they are, what they were asked, how they are told apart.

Nothing here writes, so a run may go on while it is looked at. A row is one line of `metrics.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pergrad.lab import config as configs
from pergrad.lab.config import OptimizerName, Train
from pergrad.lab.errors import LabError
from pergrad.lab.run import records

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class About:
    """What `config.json` says of a run: its options, the digest of its data, and its versions."""

    config: Train
    digest: str
    versions: Mapping[str, str]


def directories(path: Path) -> list[Path]:
    """The directories of runs at `path` or below it, at any depth.

    A run contains no other run, and hidden directories are not searched.
    """
    found = []
    for folder, folders, names in os.walk(path):
        if "config.json" in names:
            found.append(Path(folder))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found)


def about(path: Path) -> About:
    """Reads the `config.json` of a run; raises an error if it is not the configuration of a run."""
    file = path / "config.json"
    said = records.read_json(file)
    try:
        config = configs.from_json(said["config"])
        hash(config)
        numbers = [config.seed, config.batch_size, config.steps]
        if config.optimizer not in get_args(OptimizerName) or not all(type(n) is int for n in numbers):
            raise LabError(f"no run has the optimizer {config.optimizer!r} and the numbers {numbers}.")
        return About(config, str(said["data"]["digest"]), dict(said["versions"]))
    except (KeyError, TypeError, ValueError, AttributeError, LabError) as error:
        raise LabError(f"{file} is not the configuration of a run: {error}") from error


def rows(file: Path) -> list[dict[str, Any]]:
    """The rows that are complete. The last line of a run that is not done may be half written."""
    try:
        *lines, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]
        found = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise LabError(f"{file} cannot be read ({error}).") from error
    for step, row in enumerate(found, 1):
        if not isinstance(row, dict) or row.get("step") != step or "loss" not in row:
            raise LabError(f"line {step} of {file} is not the metrics of step {step}.")
    return found


# Names.


def names(options: Sequence[Train]) -> list[str]:
    """A name for each configuration: its optimizer, and the options in which they differ."""
    every = [dict(_flat(configs.to_json(config))) for config in options]
    varied = [name for name in (every[0] if every else ()) if len({str(own[name]) for own in every}) > 1]
    varied = [name for name in varied if name != "optimizer"]
    return [", ".join([own["optimizer"], *(_said(name, own[name]) for name in varied)]) for own in every]


def _flat(config: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", value


def _said(option: str, value: Any) -> str:
    """An option in words: `model.width` of 64 is "width 64", and `clip` of None is "no clip"."""
    words = option.removeprefix("model.").replace("_", " ")
    return (
        f"no {words}" if value is None else f"{words} {f'{value:g}' if type(value) is float else value}"
    )


# The noise diagnostics of a row: a flat mapping, in which `snr` is of all parameters together and
# `snr/block/kernel/value` of one.


def noise_of(row: Row) -> Row | None:
    """The noise diagnostics of a row, or None if it has none."""
    noise = row.get("noise")
    return noise if isinstance(noise, dict) else None


def layers_of(noise: Row) -> list[str]:
    """The parameters that the noise diagnostics have, as they end a name: `/block/kernel/value`."""
    return [name.removeprefix("snr") for name in noise if name.startswith("snr/")]


def layer_name(layer: str) -> str:
    """`/block/kernel/value` as `block.kernel`."""
    return ".".join(re.findall(r"\w+", layer.removesuffix("/value"))) or layer


def noise_in_divisor(noise: Row, layer: str = "") -> float | None:
    """The part of Adam's divisor that is noise: 0 is all signal, 1 all noise.

    The square of a batch's mean gradient, which Adam averages and divides by the root of, has the mean
    mu^2 + sigma^2 / B. With the noise share r = (sigma^2 / B) / mu^2, noise is r / (1 + r) of it. If no
    signal was seen, r is infinite, and all is noise. The result is None if nothing is known.
    """
    share = number(noise.get(f"noise_share{layer}"))
    if share is not None:
        return share / (1 + share)
    return 1.0 if noise.get(f"snr{layer}") == 0 else None


def number(x: Any) -> float | None:
    """`x` as a float; None if it is not finite, or not a number."""
    return float(x) if isinstance(x, int | float) and math.isfinite(x) else None
