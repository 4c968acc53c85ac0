"""The two photographs that scikit-learn brings along, cut into small pieces, without a download.

Each colour channel of a photograph is a picture of its own, cut into pieces of 8 x 8 pixels without
overlap. Whole blocks of 32 x 32 pixels go to one part, with all three channels, in the order of a hash
of their place, so no pixel of a test block is seen in training, in any colour. Blocks touch, so a pixel
at the edge of a block can have neighbours in another part. What does not fill a block at the right and
at the bottom is left out. So are pieces for validation that also occur in training, such as those of a
sky that is all white.

JPEG files are decoded by Pillow, whose versions may differ by one step of brightness here and there. The
digest says whether two machines have the same pixels.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import grain
import numpy as np

from pergrad.lab.run import data

NAMES = ("china.jpg", "flower.jpg")
BLOCK, PIECE = 32, 8  # the side of a block that goes to one part, and of an example, in pixels
SHARES = {"tune": 0.1, "test": 0.1}  # of the blocks; the others are for training


@dataclass(frozen=True, eq=False)
class Photos:
    """Pieces of photographs, int32 [n, 8, 8], with numbers from 0 to 255."""

    name: str
    train: np.ndarray
    tune: np.ndarray
    test: np.ndarray
    digest: str


@functools.lru_cache(maxsize=1)
def load_photos() -> Photos:
    """The pieces of both photographs, 80/10/10. No piece for validation occurs in training."""
    from sklearn import datasets

    blocks = {}
    for name in NAMES:
        photo = datasets.load_sample_image(name)
        for row in range(0, photo.shape[0] - BLOCK + 1, BLOCK):
            for column in range(0, photo.shape[1] - BLOCK + 1, BLOCK):
                place = f"{name} {row} {column}".encode()
                blocks[hashlib.sha256(place).digest()] = photo[
                    row : row + BLOCK, column : column + BLOCK
                ]
    ordered = [pieces(blocks[key]) for key in sorted(blocks)]
    ends = np.cumsum([round(share * len(ordered)) for share in SHARES.values()])
    first, second = ends.tolist()
    parts = {"train": ordered[second:], "tune": ordered[:first], "test": ordered[first:second]}
    train, *others = (np.concatenate(part).astype(np.int32) for part in parts.values())
    tune, test = (_new(part, train) for part in others)
    digest = data.digest_of({"train": [train], "tune": [tune], "test": [test]})
    name = f"two photographs of scikit-learn, in {len(train) + len(tune) + len(test)} pieces of 8 x 8"
    return Photos(name, train, tune, test, digest)


def pieces(block: np.ndarray) -> np.ndarray:
    """The pieces [n, 8, 8] of a block [32, 32, channels], a channel after the other."""
    n = BLOCK // PIECE
    cut = block.reshape(n, PIECE, n, PIECE, -1)  # row of pieces, row, column of pieces, column, channel
    return np.transpose(cut, (4, 0, 2, 1, 3)).reshape(-1, PIECE, PIECE)


def _new(part: np.ndarray, train: np.ndarray) -> np.ndarray:
    """The pieces of the part that do not occur in training."""
    known = {piece.tobytes() for piece in train}
    return part[[piece.tobytes() not in known for piece in part]]


def batches(photos: Photos, *, batch_size: int, seed: int, outliers: float = 0.0) -> grain.MapDataset:
    """`batches(...)[step]` is int32 [batch_size, 8, 8]; order and outliers as in `data.batches`."""
    train = data.with_outliers(photos.train, outliers, 256, seed)
    return data.endless(train.__getitem__, len(train), batch_size, seed)


def spread(part: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` pieces, evenly spread over the part."""
    n = min(limit, len(part))
    return part[np.arange(n) * len(part) // n]
