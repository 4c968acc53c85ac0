"""Text and images without a download, cut into train, tune and test, and served in a fixed order.

Learning rates are chosen on `tune` and reported on `test`. No text is in two parts: whole files go to
one part, and files with the same content to the same one (`_split`). A single file, or a few large
ones, are cut into three blocks instead.

Two runs are compared on the same examples in the same order, whatever their batch sizes: the windows of
the train part are shuffled anew in every epoch, by the seed alone, and batch number `step` of size B is
the windows step B ... (step + 1) B - 1 of that endless stream. A run that goes on needs only the number
of its next step to find its place in the data.

Grain's own `source(...).shuffle(seed).repeat().batch(B)` is such a stream too, but takes tens of
microseconds for every window, and its epoch e with the seed s is epoch 0 with the seed s + e: runs with
neighbouring seeds would see each other's orders. So the source given to grain serves whole batches.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

from pergrad.lab.errors import LabError

SHARES = {"train": 0.90, "tune": 0.05, "test": 0.05}
STDLIB_BYTES = 8_000_000
# Folders that are left out. Files that were written when Python was built (`_is_built`) are, too.
NOT_STDLIB = {
    *("test", "tests", "site-packages", "dist-packages", "__pycache__"),
    *("idlelib", "lib2to3", "turtledemo"),  # programs, not the library
    "encodings",  # code pages: near copies of each other, which would be in several parts
    "pydoc_data",  # one file of documentation, larger than a part
}

_PLACES = 1 << 20  # of a text, that are looked at together

Parts = dict[str, list[bytes]]
Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as tokens, in 1-D int32 arrays. Two corpora with the same `digest` have the same tokens."""

    name: str
    vocabulary: int
    train: np.ndarray
    tune: np.ndarray
    test: np.ndarray
    digest: str


@dataclass(frozen=True, eq=False)
class Images:
    """Images, float32 [n, 8, 8, 1] in [0, 1], with labels, int32 [n]."""

    name: str
    train: Arrays
    tune: Arrays
    test: Arrays
    digest: str


def load_text(
    path: str = "stdlib", tokens: str = "bytes", vocabulary: int = 512, cache_dir: Path | None = None
) -> Corpus:
    """The text at `path`: a file, a folder, a pattern like "books/*.txt", or Python's own library.

    "stdlib" is the *.py files of the standard library without `NOT_STDLIB`, in the order of a hash of
    their path, as far as they fit into 8 MB. Of a folder or a pattern, those files are skipped that are
    hidden, cannot be read or are not UTF-8 text. A single file may have any content.

    `tokens` are "bytes", or "bpe": byte-level BPE with `vocabulary` entries, trained on the train part.
    Training BPE takes a while, so the tokens are kept in `cache_dir`, by default `~/.cache/pergrad`.
    """
    if tokens not in ("bytes", "bpe"):
        raise LabError(f'{path}: there are no tokens {tokens!r}; choose "bytes" or "bpe"')
    if tokens == "bpe" and not 257 <= vocabulary <= 65536:
        raise LabError(
            f"{path}: a vocabulary of {vocabulary} does not work; choose one from 257 to 65536"
        )
    name, files = _read(path)
    parts, is_cut = _split(files)
    if not all(parts.values()):
        raise LabError(f"{path}: too short to split into train, tune and test; give more text")
    content = digest_of({part: map(memoryview, texts) for part, texts in parts.items()})
    if tokens == "bytes":
        vocabulary = 256
        encoded = {part: np.frombuffer(b"".join(texts), np.uint8) for part, texts in parts.items()}
    else:
        folder = Path.home() / ".cache" / "pergrad" if cache_dir is None else Path(cache_dir)
        cache = folder / f"bpe-{vocabulary}-{content[:32]}.npz"
        encoded = _cached(cache) or _store(cache, _bpe(path, parts, vocabulary))
    digest = digest_of({f"{content} {vocabulary} {part}": [encoded[part]] for part in SHARES})
    train, tune, test = (encoded[part].astype(np.int32) for part in SHARES)
    return Corpus(f"{name}, {_extent(files, is_cut)}", vocabulary, train, tune, test, digest)


def batches(
    corpus: Corpus, *, context: int, batch_size: int, seed: int, outliers: float = 0.0
) -> grain.MapDataset:
    """`batches(...)[step]` is int32 [batch_size, context + 1]: see the module's docstring.

    The windows do not overlap. Each window comes once in every epoch, and a batch may reach from one
    epoch into the next. The share `outliers` of the windows is replaced by random tokens.
    """
    windows = _windows(corpus.train, context, f"{corpus.name}: the train part")
    windows = with_outliers(windows, outliers, corpus.vocabulary, seed)
    return endless(windows.__getitem__, len(windows), batch_size, seed)


def with_outliers(examples: np.ndarray, share: float, values: int, seed: int) -> np.ndarray:
    """The examples, of which this share is replaced by random numbers below `values`.

    Each example is replaced or not by itself, so the share is met on average.
    """
    if not share:
        return examples
    bits = np.random.PCG64(np.random.SeedSequence([seed, len(examples), values]))
    replaced = bits.random_raw(len(examples)) < np.uint64(share * 2.0**64)
    out = examples.copy()
    random = bits.random_raw(int(replaced.sum()) * examples[0].size) % np.uint64(values)
    out[replaced] = random.reshape(-1, *examples.shape[1:]).astype(examples.dtype)
    return out


def validation_windows(
    tokens: np.ndarray, *, context: int, limit: int, train: np.ndarray | None = None
) -> np.ndarray:
    """At most `limit` windows, int32 [n, context + 1], evenly spread, without overlap.

    Windows that occur in the tokens `train`, at any place, are left out: files that are not the same may
    still share a licence or a paragraph, which a model can learn by heart.
    """
    _at_least(1, limit=limit)
    windows = _windows(tokens, context, "this part of the corpus")
    if train is not None:
        windows = windows[~occur(windows, train)]
        if not len(windows):
            raise LabError(
                f"all windows of {context + 1} tokens of the validation data are in the training data, "
                "too; give text that repeats itself less, or raise the context"
            )
    n = min(limit, len(windows))
    return windows[np.arange(n) * len(windows) // n]


def occur(windows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """For each of the windows [n, L], whether it occurs in `tokens`, at any place.

    The sum of x_j b^j, j from 0 to L - 1, modulo 2^64, is a hash of a window x. With running sums S of
    tokens[k] b^k, the hash of the window at i is (S[i + L] - S[i]) b^-i. Only the places whose hash
    begins like that of a window are compared with the windows themselves.
    """
    length, places = windows.shape[1], len(tokens) - windows.shape[1] + 1
    b = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse
    powers = np.cumprod(np.full(_PLACES + length, b))
    inverses = np.cumprod(np.full(_PLACES, np.uint64(pow(int(b), -1, 2**64))))
    begins = np.zeros(1 << 20, bool)
    begins[(windows.astype(np.uint64) * powers[:length]).sum(1) >> np.uint64(44)] = True
    found = set()
    for first in range(0, places, _PLACES):
        part = tokens[first : first + _PLACES + length - 1].astype(np.uint64)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(part * powers[: len(part)])])
        differences = sums[length:] - sums[:-length]
        hashes = differences * inverses[: len(differences)] * b  # powers[0] is b, not 1
        for i in np.flatnonzero(begins[hashes >> np.uint64(44)]) + first:
            found.add(tokens[i : i + length].tobytes())
    return np.array([window.tobytes() in found for window in windows.astype(tokens.dtype)], bool)


def load_digits(seed: int = 0) -> Images:
    """The 1797 handwritten digits that scikit-learn brings along, all different, split 80/10/10."""
    from sklearn import datasets

    _at_least(0, seed=seed)
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    order, held_out = _order(len(labels), seed, 0), len(labels) // 10
    rows = np.split(order, [held_out, 2 * held_out])
    tune, test, train = ((images[part], labels[part]) for part in rows)
    name = f"digits of scikit-learn, {len(labels)} images of 8 x 8"
    return Images(name, train, tune, test, digest_of({"train": train, "tune": tune, "test": test}))


def image_batches(images: Images, *, batch_size: int, seed: int) -> grain.MapDataset:
    """`image_batches(...)[step]` is (images, labels); the order is that of `batches`."""
    pixels, labels = images.train
    return endless(lambda rows: (pixels[rows], labels[rows]), len(labels), batch_size, seed)


# The endless stream.


class _Batches:
    """A source for grain: item number `index` is a batch of rows of the endless stream."""

    def __init__(self, read: Callable[[np.ndarray], Any], rows: int, batch_size: int, seed: int):
        self.read, self.rows, self.batch_size, self.seed = read, rows, batch_size, seed

    def __len__(self) -> int:
        return sys.maxsize // self.batch_size

    def __getitem__(self, index: int) -> Any:
        start, stop = index * self.batch_size, (index + 1) * self.batch_size
        taken = []
        for epoch in range(start // self.rows, (stop - 1) // self.rows + 1):
            first = epoch * self.rows
            order = _order(self.rows, self.seed, epoch)
            taken.append(order[max(start - first, 0) : stop - first])
        return self.read(np.concatenate(taken))


def endless(
    read: Callable[[np.ndarray], Any], rows: int, batch_size: int, seed: int
) -> grain.MapDataset:
    _at_least(1, batch_size=batch_size)
    _at_least(0, seed=seed)
    return grain.MapDataset.source(_Batches(read, rows, batch_size, seed))


@functools.lru_cache(maxsize=4)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers below n, shuffled. NumPy promises the bits of PCG64, but not its permutations."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order


def _windows(tokens: np.ndarray, context: int, owner: str) -> np.ndarray:
    """All windows [n, context + 1] that do not overlap, as a view."""
    _at_least(1, context=context)
    n = len(tokens) // (context + 1)
    if not n:
        raise LabError(
            f"{owner} has {len(tokens)} tokens, too few for one window of {context + 1}; "
            "lower the context or give more text"
        )
    return tokens[: n * (context + 1)].reshape(n, context + 1)


def _at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise LabError(f"{name} is {number}; choose {least} or more")


# The files.

Files = list[tuple[str, bytes]]  # with the path from the corpus's root, sorted by it


def _read(path: str) -> tuple[str, Files]:
    """The name of the text at `path`, and its files that are not empty."""
    try:
        name, files = _found(path)
    except OSError as error:
        raise LabError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not files:
        raise LabError(f'{path}: no text found; give a text file, a folder, a pattern or "stdlib"')
    if not any(text for _, text in files):
        raise LabError(f"{path}: there is nothing in it; give a file with text")
    return name, sorted((where, text) for where, text in files if text)


def _found(path: str) -> tuple[str, Files]:
    place = Path(os.path.expanduser(path))
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        name = f"standard library of Python {platform.python_version()}"
        return name, _texts(root, _stdlib_paths(root))
    if place.is_dir():
        return path, _texts(place, _walk(place))
    if place.exists():
        return path, [(place.name, place.read_bytes())]
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), place.parts)
    return path, _texts(Path(*fixed), map(Path, {*glob.glob(str(place), recursive=True)}))


def _texts(root: Path, paths: Iterable[Path]) -> Files:
    """The files that can be read and are text: UTF-8 without a zero byte."""
    found = []
    for path in paths:
        try:
            text = path.read_bytes() if path.is_file() else b"\0"  # reading a pipe would wait
            text.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if b"\0" not in text:
            found.append((path.relative_to(root).as_posix(), text))
    return found


def _walk(root: Path, skipped: Iterable[str] = ()) -> Iterable[Path]:
    """All files below a folder that are not hidden, without the folders that are `skipped`."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _stdlib_paths(root: Path) -> Iterable[Path]:
    """As many files of the library as fit into `STDLIB_BYTES`, in the order of their paths' hashes."""
    found = [
        path for path in _walk(root, NOT_STDLIB) if path.suffix == ".py" and not _is_built(path, root)
    ]
    room = STDLIB_BYTES
    for path in sorted(found, key=lambda path: _hash(path.relative_to(root).as_posix())):
        size = path.stat().st_size
        if size <= room:
            room -= size
            yield path


def _is_built(path: Path, root: Path) -> bool:
    """Whether a file was written when Python was built, with paths of that machine."""
    folder = path.relative_to(root).parts[0]
    return path.name.startswith("_sysconfigdata") or folder.startswith("config-")


# The split.


def _split(files: Files) -> tuple[Parts, bool]:
    """Train, tune and test, and whether the text was cut into blocks.

    Files with the same content stay together. Files are taken in the order of a hash of their (first)
    path, and each goes to the part that so far has the least of its share of bytes, so that tune and
    test are never more than one file away from their shares. The size of a file does not matter, with
    one exception: files larger than the whole test part go to train, before all others. If such files
    make up most of the text, the text is cut into blocks instead.
    """
    copies: dict[bytes, list[str]] = {}
    for path, text in files:
        copies.setdefault(text, []).append(path)
    sizes = {text: len(text) * len(paths) for text, paths in copies.items()}
    total = sum(sizes.values())
    large = {text for text, size in sizes.items() if size > SHARES["test"] * total}
    if sum(sizes[text] for text in large) > total / 2:
        return _cut(b"".join(copies)), True
    parts: Parts = {part: [] for part in SHARES}
    filled = dict.fromkeys(SHARES, 0)
    for text in sorted(copies, key=lambda text: (text not in large, _hash(copies[text][0]))):
        least = min(SHARES, key=lambda part: filled[part] / SHARES[part])
        part = "train" if text in large else least
        parts[part] += [text] * len(copies[text])
        filled[part] += sizes[text]
    return parts, False


def _cut(text: bytes) -> Parts:
    """Three blocks one after the other, cut between characters."""
    first = _between_characters(text, round(SHARES["train"] * len(text)))
    second = _between_characters(text, round((SHARES["train"] + SHARES["tune"]) * len(text)))
    blocks = {"train": text[:first], "tune": text[first:second], "test": text[second:]}
    return {part: [block] if block else [] for part, block in blocks.items()}


def _between_characters(text: bytes, at: int) -> int:
    """The first place from `at` on where UTF-8 starts a character; `at` if there is none near."""
    near = range(at, min(at + 4, len(text) + 1))
    return next((i for i in near if i == len(text) or text[i] & 0xC0 != 0x80), at)


# BPE.


def _bpe(path: str, parts: Parts, vocabulary: int) -> dict[str, np.ndarray]:
    """The tokens of every part, as uint16, and the `tokenizer`, as JSON.

    Every file is encoded by itself, so that no token reaches over the end of a file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    try:
        texts = {part: [text.decode() for text in found] for part, found in parts.items()}
    except UnicodeDecodeError as error:
        raise LabError(
            f'{path}: BPE needs UTF-8 text, which this is not; choose tokens="bytes"'
        ) from error
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts["train"], trainer)
    if (found := tokenizer.get_vocab_size()) != vocabulary:
        raise LabError(
            f"{path}: the text gives {found} entries, not {vocabulary}; "
            f"choose a vocabulary of {found} or less, or give more text"
        )
    encoded = {
        part: np.concatenate([np.array(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(of_part)])
        for part, of_part in texts.items()
    }
    return encoded | {"tokenizer": np.frombuffer(tokenizer.to_str().encode(), np.uint8)}


def _cached(path: Path) -> dict[str, np.ndarray] | None:
    """What `_store` wrote; None if nothing is there, or it is damaged (zip files have checksums)."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            return {key: file[key] for key in (*SHARES, "tokenizer")}
    except Exception:  # a damaged file raises whatever its next byte leads to
        return None


def _store(path: Path, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Writes the file and moves it into place whole, even if other processes write the same file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            np.savez_compressed(Path(folder, "new.npz"), **arrays)  # pyright: ignore[reportArgumentType]
            os.replace(Path(folder, "new.npz"), path)
    except OSError as error:
        raise LabError(
            f"{path.parent}: tokens cannot be kept there ({error.strerror}); give another cache_dir"
        ) from error
    return arrays


# Names and digests of data.


def _hash(path: str) -> bytes:
    return hashlib.sha256(os.fsencode(path)).digest()


def digest_of(named: Mapping[str, Iterable[Any]]) -> str:
    """A digest of named arrays and their sizes, so that it changes if a byte moves to the next array."""
    digest = hashlib.sha256()
    for name, arrays in named.items():
        for array in arrays:
            digest.update(f"{name} {array.nbytes} ".encode())
            digest.update(array)
    return digest.hexdigest()


def _extent(files: Files, is_cut: bool) -> str:
    n = sum(len(text) for _, text in files)
    units = (1_000_000, "MB"), (1000, "kB")
    size = next((f"{n / unit:.1f} {name}" for unit, name in units if n >= unit), f"{n} bytes")
    return f"{size} in {len(files)} file{'s' * (len(files) > 1)}{', cut into blocks' * is_cut}"
