"""What a run is asked to do: plain dataclasses, from which the command line is made.

Everything that can change a number is in here, so that two runs with equal configurations, data and
versions have equal metrics, bit for bit, if they run on the same devices. On other devices the metrics
differ by rounding. The devices are not part of the configuration (see `run.devices`): an interrupted run
may go on with others.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

from pergrad.lab.errors import LabError

OptimizerName = Literal[
    "adam",
    "micro_adam",
    "micro_adam_var",
    "micro_adam_msq",
    "preconditioned_adam",
    "ada_momentum",
    "micro_sign_sgd",
    "sign_sgd",
    "sign_ema",
    "share_adam",
    "shrunk_adam",
    "corrected_adam",
]
DomainName = Literal["text", "images"]
KindName = Literal["transformer", "lstm"]
StudyName = Literal[
    "sign",
    "arms",
    "argument",
    "adam",
    "plane",
    "rivals",
    "scaling",
    "law",
    "ramp",
    "clipping",
    "quantile",
    "snr",
    "overhead",
]
PresetName = Literal["demo", "quick", "full"]  # they take minutes, a quarter of an hour, hours
# The tasks (groups of statistics) and the models of `pergrad bench`, and its three parts.
TaskName = Literal["moments", "norms", "clipped", "five", "tokens"]
CaseName = Literal[
    "mlp",
    "cnn",
    "resnet",
    "lstm",
    "transformer_long",
    "transformer_wide",
    "transformer_vocab",
    "transformer_tied",
    "transformer_scanned",
    "experts",
    "flax",
]
LargeName = Literal[  # models that are only compiled, for a target
    "large_mlp",
    "large_resnet",
    "large_lstm",
    "large_experts",
    "large_two_layers",
    "large_transformer",
    "large_transformer_small_vocab",
    "large_transformer_scanned",
    "billion",
]
PartName = Literal["models", "growth", "compile"]
TargetName = Literal["tpu:v5e", "tpu:v5p", "tpu:v6e", "gpu:h100"]  # what `bench` can compile for
# The data of every domain; the first is the default. A text may also be a file, a folder or a glob.
SOURCES: dict[DomainName, tuple[str, ...]] = {"text": ("stdlib",), "images": ("photos", "digits")}


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained: for text a language model, for images a convolutional network."""

    kind: KindName = "transformer"
    """What reads text: a decoder-only transformer, or an LSTM. Images have a convolutional network."""
    layers: int = 2
    """Blocks of attention and feed-forward layer, layers of the LSTM, or pairs of convolutions."""
    width: int = 64
    """Features of a token or a pixel."""
    heads: int = 4
    """Attention heads of the transformer; they share the width."""
    context: int = 64
    """Tokens of text that a prediction can look back on."""
    tied: bool = False
    """Whether the output layer is the embedding, transposed."""
    scanned: bool = False
    """Whether the blocks are stacked and run in a loop: compiles in the time of one block."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; parameters are float32."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise LabError(f"model.{name} must be at least 1, not {getattr(self, name)}.")
        if self.width % self.heads:
            raise LabError(f"{self.heads} heads cannot share a width of {self.width}.")


@dataclasses.dataclass(frozen=True)
class Train:
    """One run: a model, data, an optimizer, and how long."""

    optimizer: OptimizerName = "adam"
    """Which optimizer: see docs/optimizers.md."""
    learning_rate: float = 1e-2
    """The largest learning rate, after warm-up."""
    batch_size: int = 16
    """Examples (windows of text, pieces of photographs, or images) in a step."""
    steps: int = 500
    """How many steps."""
    seed: int = 0
    """Of the parameters and of the order of the examples."""
    domain: DomainName = "text"
    """Text, whose next token is predicted, or images."""
    data: str = ""
    """Text: `stdlib` (the sources of Python's library), a file, folder or glob. Images: `photos` (every
    pixel of two photographs is predicted) or `digits` (handwritten, to be told apart). By default the
    first."""
    tokens: Literal["bytes", "bpe"] = "bytes"
    """What the text is cut into."""
    vocabulary: int = 512
    """How many tokens a BPE vocabulary has."""
    model: Model = dataclasses.field(default_factory=Model)
    warmup: float = 0.1
    """The part of the steps in which the learning rate rises."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What the learning rate does then: it falls along a cosine, to zero, or stays."""
    b1: float = 0.9
    """Decay of the momentum."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices, times the learning rate."""
    mean_square: float = 1.0
    """For preconditioned_adam: the weight of mu^2."""
    variance: float | Literal["1/B"] = "1/B"
    """For preconditioned_adam: the weight of sigma^2."""
    mean_signs: str = ""
    """For micro_sign_sgd: layers whose sign is taken of the mean gradient, such as `head,embed`."""
    max_update: float | None = None
    """The largest update of a coordinate, before the learning rate (Adam's family)."""
    start_at_batch: bool = False
    """For adam: the second moment starts at the mean of the examples' squares, in place of 0."""
    floor: float | None = None
    """The floor of mu^2 in standard errors (micro_adam_msq and preconditioned_adam)."""
    clip: float | None = None
    """The largest norm of a gradient. With --clip-by quantile: the share of the examples that have a
    smaller one."""
    clip_by: Literal["batch", "example", "quantile"] = "batch"
    """Of which gradient: the mean of the batch, or every example's, at this norm or at this quantile of
    the norms of earlier batches."""
    outliers: float = 0.0
    """The share of the training examples that are replaced by random tokens or pixels."""
    microbatch_size: int | Literal["auto"] | None = None
    """How many examples go through the model at a time."""
    validate_every: int = 100
    """Steps between validations; the last step is always validated."""
    noise_every: int = 0
    """Steps between noise diagnostics; 0 for none."""
    checkpoint_every: int = 100
    """Steps between checkpoints: what is lost if the run is killed."""
    keep: int = 2
    """How many checkpoints are kept, the last ones; 0 for all."""

    def __post_init__(self) -> None:
        if self.data == "":
            object.__setattr__(self, "data", SOURCES[self.domain][0])
        self._check_domain()
        for name in ("batch_size", "steps", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise LabError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.keep < 0 or self.noise_every < 0:
            name = "keep" if self.keep < 0 else "noise_every"
            raise LabError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if not 0 <= self.warmup <= 1:
            raise LabError(f"warmup is a part of the steps, from 0 to 1, not {self.warmup}.")
        for name in ("learning_rate", "eps", "clip", "max_update", "floor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise LabError(f"{name} must be a positive number, not {value}.")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise LabError(f"{name} is a decay, from 0 to below 1, not {getattr(self, name)}.")
        if self.clip_by == "quantile" and not (self.clip is not None and self.clip < 1):
            raise LabError(f"--clip-by quantile needs --clip between 0 and 1, not {self.clip}.")
        if not 0 <= self.outliers < 1:
            raise LabError(f"outliers is a share of examples, from 0 to below 1, not {self.outliers}.")
        if self.outliers and self.data == "digits":
            raise LabError("outliers are of text and of photos; the digits have none.")
        if not 0 <= self.weight_decay < math.inf:
            raise LabError(f"weight_decay must be at least 0, not {self.weight_decay}.")

    def _check_domain(self) -> None:
        images = SOURCES["images"]
        if self.domain == "text" and self.data in images:
            raise LabError(
                f"{self.data} are images, not text: write --domain images --data {self.data}."
            )
        if self.domain == "images" and self.data not in images:
            raise LabError(f"there are no images {self.data}: choose --data {' or '.join(images)}.")
        if self.domain == "images" and self.model.kind != "transformer":
            raise LabError(
                f"--model.kind {self.model.kind} reads text; images have a convolutional network."
            )


def to_json(config: Train) -> dict[str, Any]:
    """The configuration as JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(data: dict[str, Any]) -> Train:
    """The inverse of `to_json`; it also reads configurations of before there were domains."""
    domain = "images" if data.get("data") in SOURCES["images"] else "text"
    return Train(**{"domain": domain, **data, "model": Model(**data["model"])})


def differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """Where two configurations differ, as `name: a, not b`."""
    out = []
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            out += differences(x, y, f"{prefix}{name}.")
        elif x != y:
            out.append(f"{prefix}{name} is {x!r}, not {y!r}")
    return out
