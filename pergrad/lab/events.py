"""A run's metrics as TensorBoard reads them, made from `metrics.jsonl` when the run is done."""

from __future__ import annotations

from pathlib import Path

from pergrad.lab.files import disk_errors
from pergrad.lab.runs import read_metrics


def write(run_dir: Path) -> Path:
    """Event files in `run_dir/tensorboard`, in place of those that are there."""
    from tensorboardX import SummaryWriter

    out = run_dir / "tensorboard"
    with disk_errors(out):
        for old in out.glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(out)) as writer:
            for row in read_metrics(run_dir):
                numbers = {name: x for name, x in row.items() if name not in ("step", "noise")}
                numbers |= {f"noise/{name}": x for name, x in row.get("noise", {}).items()}
                for name, x in numbers.items():
                    if x is not None:
                        writer.add_scalar(name, x, row["step"])
    return out
