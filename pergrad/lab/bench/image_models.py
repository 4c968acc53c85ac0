"""The models of images that are timed, with the methods of those in `models`.

A batch is `(images, labels)`: float32 `[B, H, W, 3]` and int32 `[B]`. Shapes are named by their axes:
B examples, H rows, W columns, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pergrad.lab.bench.models import (
    Compute,
    Params,
    affine,
    cast,
    cross_entropy,
    init_norm,
    normal,
    widen,
)

NORM_GROUPS = 8  # of the features


@dataclass(frozen=True)
class CNN:
    """3 x 3 convolutions with relu, a mean over all pixels, and a linear classifier."""

    batch: int
    size: int
    widths: tuple[int, ...]
    strides: tuple[int, ...]
    classes: int
    compute: Compute = None

    def init(self, key: jax.Array) -> Params:
        head_key, *keys = jax.random.split(key, 1 + len(self.widths))
        pairs = zip(keys, (3, *self.widths[:-1]), self.widths, strict=True)
        return {
            "layers": [
                {"kernel": _kernel(layer_key, 3, *widths), "bias": jnp.zeros(widths[1])}
                for layer_key, *widths in pairs
            ],
            "head": normal(head_key, self.widths[-1], self.classes),
            "head_bias": jnp.zeros(self.classes),
        }

    def sample(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _images(key, self.batch, self.size, self.classes)

    def loss(self, params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        images_BHWD, labels_B = batch
        x_BHWD = cast(images_BHWD, self.compute)
        for layer, stride in zip(params["layers"], self.strides, strict=True):
            y_BHWD = _convolution(layer["kernel"], x_BHWD, stride)
            x_BHWD = jax.nn.relu(y_BHWD + layer["bias"].astype(y_BHWD.dtype))
        return _classified(params, x_BHWD, labels_B)


@dataclass(frozen=True)
class ResNet:
    """Stages of residual blocks with two 3 x 3 convolutions and group norm.

    Each stage but the first starts with a stride of 2.
    """

    batch: int
    size: int
    widths: tuple[int, ...]
    blocks: int | tuple[int, ...]  # of each stage
    classes: int
    compute: Compute = None

    def init(self, key: jax.Array) -> Params:
        depths = (self.blocks,) * len(self.widths) if isinstance(self.blocks, int) else self.blocks
        widths = [w for w, depth in zip(self.widths, depths, strict=True) for _ in range(depth)]
        stem_key, head_key, *keys = jax.random.split(key, 2 + len(widths))
        stem = self._init_stem(stem_key)
        pairs = zip(keys, (stem.shape[-1], *widths[:-1]), widths, strict=True)
        return {
            "stem": stem,
            "stem_norm": init_norm(stem.shape[-1]),
            "blocks": [self._init_block(block_key, *pair) for block_key, *pair in pairs],
            "head": normal(head_key, widths[-1], self.classes),
            "head_bias": jnp.zeros(self.classes),
        }

    def _init_stem(self, key: jax.Array) -> jax.Array:
        return _kernel(key, 3, 3, self.widths[0])

    def _init_block(self, key: jax.Array, before: int, width: int) -> Params:
        first_key, second_key, shortcut_key = jax.random.split(key, 3)
        block = {
            "first": _kernel(first_key, 3, before, width),
            "first_norm": init_norm(width),
            "second": _kernel(second_key, 3, width, width),
            "second_norm": init_norm(width),
        }
        return _with_shortcut(block, shortcut_key, before, width)

    def sample(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _images(key, self.batch, self.size, self.classes)

    def loss(self, params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        images_BHWD, labels_B = batch
        x_BHWD = self._stem(params, cast(images_BHWD, self.compute))
        for block in params["blocks"]:
            stride = 2 if "shortcut" in block else 1
            y_BHWD = self._branch(block, x_BHWD, stride)
            if "shortcut" in block:
                x_BHWD = _convolution(block["shortcut"], x_BHWD, stride)
            x_BHWD = jax.nn.relu(x_BHWD + y_BHWD)
        return _classified(params, x_BHWD, labels_B)

    def _stem(self, params: Params, x_BHWD: jax.Array) -> jax.Array:
        return jax.nn.relu(_group_norm(params["stem_norm"], _convolution(params["stem"], x_BHWD, 1)))

    def _branch(self, block: Params, x_BHWD: jax.Array, stride: int) -> jax.Array:
        y_BHWD = _convolution(block["first"], x_BHWD, stride)
        y_BHWD = jax.nn.relu(_group_norm(block["first_norm"], y_BHWD))
        return _group_norm(block["second_norm"], _convolution(block["second"], y_BHWD, 1))


@dataclass(frozen=True)
class BottleneckResNet(ResNet):
    """A `ResNet` for large images, as ResNet-50 is: its blocks have three convolutions.

    The first and the last are 1 x 1; between them a 3 x 3 convolution has a quarter of the features. The
    stem is 7 x 7 with a stride of 4, in place of a stride of 2 and a pooling.
    """

    def _init_stem(self, key: jax.Array) -> jax.Array:
        return _kernel(key, 7, 3, self.widths[0])

    def _init_block(self, key: jax.Array, before: int, width: int) -> Params:
        narrow_key, first_key, second_key, shortcut_key = jax.random.split(key, 4)
        narrow = width // 4
        block = {
            "narrow": _kernel(narrow_key, 1, before, narrow),
            "narrow_norm": init_norm(narrow),
            "first": _kernel(first_key, 3, narrow, narrow),
            "first_norm": init_norm(narrow),
            "second": _kernel(second_key, 1, narrow, width),
            "second_norm": init_norm(width),
        }
        return _with_shortcut(block, shortcut_key, before, width)

    def _stem(self, params: Params, x_BHWD: jax.Array) -> jax.Array:
        return jax.nn.relu(_group_norm(params["stem_norm"], _convolution(params["stem"], x_BHWD, 4)))

    def _branch(self, block: Params, x_BHWD: jax.Array, stride: int) -> jax.Array:
        y_BHWD = _convolution(block["narrow"], x_BHWD, 1)
        y_BHWD = jax.nn.relu(_group_norm(block["narrow_norm"], y_BHWD))
        return super()._branch(block, y_BHWD, stride)


def _with_shortcut(block: Params, key: jax.Array, before: int, width: int) -> Params:
    return block if before == width else block | {"shortcut": _kernel(key, 1, before, width)}


def _classified(params: Params, x_BHWD: jax.Array, labels_B: jax.Array) -> jax.Array:
    """The loss of a linear classifier of the mean over all pixels."""
    mean_BD = jnp.mean(x_BHWD, axis=(1, 2))
    return cross_entropy(affine(mean_BD, params["head"], params["head_bias"]), labels_B)


def _kernel(key: jax.Array, size: int, d_in: int, d_out: int) -> jax.Array:
    return jax.random.normal(key, (size, size, d_in, d_out)) / (size * d_in**0.5)


def _convolution(kernel: jax.Array, x_BHWD: jax.Array, stride: int) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x_BHWD, kernel.astype(x_BHWD.dtype), (stride, stride), "SAME", dimension_numbers=layout
    )


def _group_norm(params: Params, x_BHWD: jax.Array) -> jax.Array:
    grouped = widen(x_BHWD).reshape(*x_BHWD.shape[:3], NORM_GROUPS, -1)
    centred = grouped - jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(centred**2, axis=(1, 2, 4), keepdims=True)
    normed_BHWD = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x_BHWD.shape)
    return (normed_BHWD * params["scale"] + params["bias"]).astype(x_BHWD.dtype)


def _images(key: jax.Array, batch: int, size: int, classes: int) -> tuple[jax.Array, jax.Array]:
    image_key, label_key = jax.random.split(key)
    images = jax.random.normal(image_key, (batch, size, size, 3))
    return images, jax.random.randint(label_key, (batch,), 0, classes, jnp.int32)
