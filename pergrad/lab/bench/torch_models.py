"""Models of `pergrad.lab.bench` in PyTorch, as a user would write them, with the same shapes.

Every parameter is in a layer of `torch.nn`, since that is where BackPACK and Opacus look for them.
Shapes are named as there: B examples, T positions, D features, H heads, K features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pergrad.lab.bench import image_models, models
from pergrad.lab.bench.models import HEAD_WIDTH


class MLP(nn.Sequential):
    """Square layers with biases, relu between them, and a squared error."""

    def __init__(self, shape: models.MLP) -> None:
        D = shape.width
        layers = [layer for _ in range(shape.layers) for layer in (nn.Linear(D, D), nn.ReLU())]
        super().__init__(*layers[:-1])

    @staticmethod
    def sample(shape: models.MLP) -> tuple[Tensor, Tensor]:
        return torch.randn(shape.batch, shape.width), torch.randn(shape.batch, shape.width)

    @staticmethod
    def losses(outputs_BD: Tensor, targets_BD: Tensor) -> Tensor:
        return torch.mean((outputs_BD - targets_BD) ** 2, dim=1)


class CNN(nn.Sequential):
    """3 x 3 convolutions with relu, a mean over all pixels, and a linear classifier."""

    def __init__(self, shape: image_models.CNN) -> None:
        layers: list[nn.Module] = []
        for before, width, stride in zip((3, *shape.widths), shape.widths, shape.strides, strict=False):
            layers += [nn.Conv2d(before, width, 3, stride, padding=1), nn.ReLU()]
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(*layers, *pool, nn.Linear(shape.widths[-1], shape.classes))

    @staticmethod
    def sample(shape: image_models.CNN) -> tuple[Tensor, Tensor]:
        images = torch.randn(shape.batch, 3, shape.size, shape.size)
        return images, torch.randint(shape.classes, (shape.batch,))

    @staticmethod
    def losses(logits: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels_B, reduction="none")


class Attention(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (
            y.reshape(B, T, D // HEAD_WIDTH, HEAD_WIDTH).transpose(1, 2)
            for y in self.qkv(x_BTD).chunk(3, dim=-1)
        )
        scores_BHTT = q @ k.transpose(-1, -2) / HEAD_WIDTH**0.5
        is_later = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights_BHTT = torch.softmax(scores_BHTT.masked_fill(is_later, -1e9), dim=-1)
        return self.out((weights_BHTT @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, D: int, has_norms: bool) -> None:
        super().__init__()
        self.attention = Attention(D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"), nn.Linear(4 * D, D))
        self.attention_norm = nn.LayerNorm(D) if has_norms else nn.Identity()
        self.mlp_norm = nn.LayerNorm(D) if has_norms else nn.Identity()

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Transformer(nn.Module):
    """A pre-norm decoder with learned positions; without its norms for those that do not know them."""

    def __init__(self, shape: models.Transformer, has_norms: bool = True) -> None:
        super().__init__()
        D, V = shape.width, shape.vocab
        self.embed, self.position = nn.Embedding(V, D), nn.Embedding(shape.length, D)
        self.blocks = nn.Sequential(*(Block(D, has_norms) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(D) if has_norms else nn.Identity()
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        # For all examples alike; written so since per-example tools want an example axis everywhere.
        positions_BT = torch.arange(tokens_BT.shape[1]).repeat(len(tokens_BT), 1)
        x_BTD = self.embed(tokens_BT) + self.position(positions_BT)
        return self.head(self.norm(self.blocks(x_BTD)))

    @staticmethod
    def sample(shape: models.Transformer) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # ghost clipping wants views

    @staticmethod
    def losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none").mean(dim=1)
