"""The lab's data: parts that share nothing, and an order that depends on the seed alone."""

import itertools
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from pergrad.lab.errors import LabError
from pergrad.lab.run import data, images
from tests.support.pages import ROOT

PARTS = ("train", "tune", "test")


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def words(seed, n):
    """Text of about n bytes with something of a language in it: a few words, over and over."""
    rng = np.random.default_rng(seed)
    known = ["loss", "gradient", "noise", "scale", "é", "batch", "\n", "    return", "x = 1"]
    return " ".join(rng.choice(known, n // 6)).encode()


def numbered(i):
    """A file whose every line says which it is."""
    lengths = np.random.default_rng(i).integers(20, 200)
    return "".join(f"file {i:03d} line {line:03d}\n" for line in range(lengths)).encode()


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "text", {f"{i % 7}/{i}.txt": numbered(i) for i in range(100)})


def text(corpus, part):
    return getattr(corpus, part).astype(np.uint8).tobytes()


def corpus_of(tokens):
    return data.Corpus("numbers", 256, tokens, tokens, tokens, "")


def stream(corpus, batch_size, n, context=4, seed=0):
    """The first n windows."""
    batches = data.batches(corpus, context=context, batch_size=batch_size, seed=seed)
    taken = [batches[step] for step in range(-(-n // batch_size))]
    assert {b.shape for b in taken} == {(batch_size, context + 1)}
    return np.concatenate(taken)[:n]


# The split.


def test_files_are_in_one_part_whole(folder):
    corpus = data.load_text(folder)
    found = {part: text(corpus, part) for part in PARTS}
    for i in range(100):
        assert sum(numbered(i) in content for content in found.values()) == 1
        assert sum(b"file %03d" % i in content for content in found.values()) == 1
    total = sum(len(numbered(i)) for i in range(100))
    assert sum(map(len, found.values())) == total
    assert len(found["tune"]) == pytest.approx(0.05 * total, rel=0.5)
    assert len(found["test"]) == pytest.approx(0.05 * total, rel=0.5)
    assert corpus.name == f"{folder}, {total / 1000:.1f} kB in 100 files"
    assert corpus.vocabulary == 256
    assert all(getattr(corpus, part).dtype == np.int32 for part in PARTS)


@pytest.mark.parametrize("large", [0, 0.2, 0.45])
@pytest.mark.parametrize("seed", range(5))
def test_shares_are_right_to_one_file(seed, large):
    sizes = np.random.default_rng(seed).lognormal(7, 0.5, 300).astype(int)
    contents = [b"%06d" % i + b"x" * size for i, size in enumerate(sizes)]
    longest = max(map(len, contents))
    contents.append(b"y" * int(sum(map(len, contents)) * large / (1 - large)))
    parts, is_cut = data._split([(f"{seed}/{i}", content) for i, content in enumerate(contents)])
    assert not is_cut
    assert contents[-1] in parts["train"] or not large
    for part in ("tune", "test"):
        assert abs(sum(map(len, parts[part])) - 0.05 * sum(map(len, contents))) <= longest


def test_copies_are_in_one_part(tmp_path):
    folder = write(
        tmp_path, {f"{copy}/{i}.txt": numbered(i) for i in range(100) for copy in "abc"[: 1 + i % 3]}
    )
    found = {part: text(data.load_text(folder), part) for part in PARTS}
    for i in range(100):
        assert sorted(content.count(numbered(i)) for content in found.values()) == [0, 0, 1 + i % 3]


def test_the_split_goes_by_relative_paths(tmp_path, folder):
    files = {f"{i % 7}/{i}.txt": numbered(i) for i in range(100)}
    moved = data.load_text(write(tmp_path / "elsewhere", files))
    assert moved.digest == data.load_text(folder).digest
    for pattern in ("**/*.txt", "**/**/*.txt", "[0-6]/*"):
        assert data.load_text(f"{folder}/{pattern}").digest == moved.digest
    renamed = data.load_text(write(tmp_path / "renamed", {f"x/{k}": v for k, v in files.items()}))
    assert renamed.digest != moved.digest


@pytest.mark.parametrize("n", [1, 3])
def test_few_files_are_cut_into_blocks(tmp_path, n):
    content = np.random.default_rng(0).integers(32, 127, 3000, np.uint8).tobytes()
    step = len(content) // n
    folder = write(tmp_path, {f"{i}.txt": content[i * step :][:step] for i in range(n)})
    write(tmp_path, {"copy.txt": content[:step]})  # which is not to be in two parts
    corpus = data.load_text(folder)
    found = [text(corpus, part) for part in PARTS]
    assert "cut into blocks" in corpus.name
    assert b"".join(found) == content
    assert [len(x) for x in found] == [2700, 150, 150]
    windows = [set(map(bytes, np.lib.stride_tricks.sliding_window_view(list(x), 8))) for x in found]
    assert not any(a & b for a, b in itertools.combinations(windows, 2))


def test_a_file_larger_than_all_others_is_cut(tmp_path, folder):
    total = sum(len(numbered(i)) for i in range(100))
    write(tmp_path / "text", {"large.txt": words(0, 2 * total)})
    corpus = data.load_text(folder)
    assert "cut into blocks" in corpus.name
    assert len(corpus.train) == pytest.approx(18 * len(corpus.test), rel=0.01)


def test_blocks_are_cut_between_characters():
    for n in range(40, 80):
        for part in data._cut("aé€🙂".encode() * n).values():
            part[0].decode()


# What is read.


def test_folders_skip_what_is_not_text(tmp_path):
    plain = {f"{i}.txt": numbered(i) for i in range(30)}
    clean = data.load_text(write(tmp_path / "clean", plain))
    others = {"zero.bin": b"a\0b", "latin.txt": b"\xe9t\xe9", ".git/config": b"[core]", ".hidden": b"x"}
    mixed = write(tmp_path / "mixed", plain | others | {"empty.txt": b""})
    os.symlink(tmp_path / "nowhere", tmp_path / "mixed" / "broken.txt")
    os.mkfifo(tmp_path / "mixed" / "pipe.txt")
    assert data.load_text(mixed).digest == clean.digest


def test_folders_skip_what_cannot_be_read(tmp_path, monkeypatch):
    folder = write(tmp_path, {f"{i}.txt": numbered(i) for i in range(30)})
    whole = data.load_text(folder)
    read = data.Path.read_bytes
    forbid(monkeypatch, lambda path: path.name == "3.txt", read)
    assert "29 files" in data.load_text(folder).name
    assert data.load_text(folder).digest != whole.digest


def forbid(monkeypatch, is_forbidden, read):
    def read_bytes(path):
        if is_forbidden(path):
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(data.Path, "read_bytes", read_bytes)


def test_a_binary_file_is_bytes(tmp_path):
    content = bytes(range(256)) * 40
    write(tmp_path, {"x.bin": content})
    corpus = data.load_text(str(tmp_path / "x.bin"))
    assert b"".join(text(corpus, part) for part in PARTS) == content


def test_standard_library():
    corpus = data.load_text()
    assert corpus.name.startswith("standard library of Python 3.")
    sizes = [len(getattr(corpus, part)) for part in PARTS]
    assert 4_000_000 < sum(sizes) <= data.STDLIB_BYTES
    assert sizes[0] / sum(sizes) == pytest.approx(0.9, abs=0.03)
    assert sizes[1] / sum(sizes) == pytest.approx(0.05, abs=0.03)


def test_standard_library_leaves_out(tmp_path):
    kept = {"a.py", "json/b.py", "unittest/c.py"}
    skipped = {"test/d.py", "json/tests/e.py", "site-packages/f.py", "encodings/cp1.py", "g.txt"}
    skipped |= {"_sysconfigdata_x.py", "config-3.11/h.py", "idlelib/i.py"}
    write(tmp_path, dict.fromkeys(kept | skipped, b"x"))
    assert {p.relative_to(tmp_path).as_posix() for p in data._stdlib_paths(tmp_path)} == kept


def test_standard_library_is_limited(tmp_path, monkeypatch):
    write(tmp_path, {f"{i}.py": b"x" * (i + 1) for i in range(50)})
    monkeypatch.setattr(data, "STDLIB_BYTES", 300)
    taken = list(data._stdlib_paths(tmp_path))
    assert 250 <= sum(path.stat().st_size for path in taken) <= 300
    assert taken == list(data._stdlib_paths(tmp_path))
    assert taken != sorted(taken)


def test_same_arguments_same_data(folder):
    one, other = data.load_text(folder), data.load_text(folder)
    assert one.digest == other.digest
    for part in PARTS:
        np.testing.assert_array_equal(getattr(one, part), getattr(other, part))


def test_data_does_not_depend_on_the_process(folder):
    """Python's `hash` differs from process to process."""
    code = f"""
        from pergrad.lab.run import data
        corpus = data.load_text({folder!r})
        batch = data.batches(corpus, context=8, batch_size=4, seed=5)[1000]
        print(corpus.digest, batch.tolist())
    """
    env = os.environ | {"PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    corpus = data.load_text(folder)
    batch = data.batches(corpus, context=8, batch_size=4, seed=5)[1000]
    assert out.stdout.strip() == f"{corpus.digest} {batch.tolist()}"


# The order.

N = 22  # windows of 5 tokens, and some tokens more
NUMBERS = corpus_of(np.arange(5 * N + 3, dtype=np.int32))


@pytest.mark.parametrize("batch_size", [3, 8, N, 2 * N + 1])
def test_order_does_not_depend_on_the_batch_size(batch_size):
    n = 3 * N + 5
    one = stream(NUMBERS, 1, n)
    assert one.dtype == np.int32
    np.testing.assert_array_equal(stream(NUMBERS, batch_size, n), one)


def test_every_window_comes_once_in_an_epoch_and_in_another_order_each_time():
    epochs = stream(NUMBERS, 4, 5 * N).reshape(5, N, 5)
    windows = np.arange(5 * N).reshape(N, 5)
    for epoch in epochs:
        np.testing.assert_array_equal(epoch[np.argsort(epoch[:, 0])], windows)
    orders = {tuple(epoch[:, 0]) for epoch in epochs}
    assert len(orders | {tuple(windows[:, 0])}) == 6


def test_seeds_have_orders_of_their_own():
    orders = [tuple(e) for seed in range(4) for e in stream(NUMBERS, 1, 4 * N, seed=seed).reshape(4, -1)]
    assert len(set(orders)) == 16  # no epoch of one is an epoch of another
    np.testing.assert_array_equal(stream(NUMBERS, 4, N, seed=3), stream(NUMBERS, 4, N, seed=3))


def test_restart_is_indexing():
    def batches():
        return data.batches(NUMBERS, context=4, batch_size=3, seed=1)

    first = [batches()[step] for step in range(20)]
    np.testing.assert_array_equal([batches()[step] for step in reversed(range(20))], first[::-1])
    np.testing.assert_array_equal(list(itertools.islice(iter(batches()), 20)), first)
    np.testing.assert_array_equal([batches()[7:20][i] for i in range(13)], first[7:])
    assert batches()[10**9].shape == (3, 5)


def test_batches_are_the_callers_own():
    batches = data.batches(NUMBERS, context=4, batch_size=3, seed=1)
    before = batches[0].copy()
    batches[0][:] = 0
    np.testing.assert_array_equal(batches[0], before)


def test_validation_windows():
    tokens = np.arange(103, dtype=np.int32)
    every = data.validation_windows(tokens, context=9, limit=50)
    np.testing.assert_array_equal(every, np.arange(100).reshape(10, 10))
    assert every.dtype == np.int32
    some = data.validation_windows(tokens, context=9, limit=4)
    np.testing.assert_array_equal(some[:, 0], [0, 20, 50, 70])
    np.testing.assert_array_equal(some, some[:, :1] + np.arange(10))


def test_windows_of_the_training_text_are_left_out():
    tokens = np.arange(40, dtype=np.int32)
    train = np.concatenate([[7, 7, 7], tokens[10:20], [5], tokens[21:29]]).astype(np.int32)
    windows = data.validation_windows(tokens, context=9, limit=50, train=train)
    np.testing.assert_array_equal(windows[:, 0], [0, 20, 30])
    with pytest.raises(LabError, match="all windows of 10 tokens"):
        data.validation_windows(tokens, context=9, limit=50, train=tokens)


@pytest.mark.parametrize("places", [5, 64, 10**4])
def test_windows_that_occur(monkeypatch, places):
    """As a search by Python finds them, over the edges of blocks and in texts shorter than a window."""
    monkeypatch.setattr(data, "_PLACES", places)
    rng = np.random.default_rng(0)
    for length, n, values in ((1, 50, 60), (3, 400, 6), (8, 300, 2), (12, 7, 3)):
        text = rng.integers(0, values, n).astype(np.int32)
        windows = rng.integers(0, values, (200, length)).astype(np.int32)
        joined = "," + ",".join(map(str, text)) + ","
        expected = ["," + ",".join(map(str, window)) + "," in joined for window in windows]
        assert data.occur(windows, text).tolist() == expected
        assert any(expected) == (n >= length) and not all(expected)


# BPE.


@pytest.fixture
def prose(tmp_path):
    return write(tmp_path / "prose", {f"{i}.txt": words(i, 600 + 10 * i) for i in range(40)})


def load_bpe(path, cache, vocabulary=300):
    return data.load_text(path, "bpe", vocabulary, cache)


def test_bpe_round_trip(prose, tmp_path):
    from tokenizers import Tokenizer

    plain, corpus = data.load_text(prose), load_bpe(prose, tmp_path / "cache")
    assert corpus.vocabulary == 300
    assert corpus.digest != plain.digest
    (file,) = (tmp_path / "cache").iterdir()
    with np.load(file) as cache:
        tokenizer = Tokenizer.from_str(cache["tokenizer"].tobytes().decode())
    for part in PARTS:
        tokens = getattr(corpus, part)
        assert tokens.dtype == np.int32
        assert tokens.max() < 300
        assert len(tokens) < 0.6 * len(getattr(plain, part))
        assert tokenizer.decode(tokens.tolist()).encode() == text(plain, part)
    unseen = "日本語 \t\r\n  \0 naïve 🙂 <|end|>"
    assert tokenizer.decode(tokenizer.encode(unseen).ids) == unseen


def test_bpe_learns_from_the_train_part_alone(tmp_path):
    train, held_out = words(0, 9000)[:9000], b"zqzqzqzqzq" * 100
    write(tmp_path, {"x.txt": train + held_out})
    assert text(data.load_text(str(tmp_path / "x.txt")), "train") == train
    corpus = load_bpe(str(tmp_path / "x.txt"), tmp_path / "cache", 280)
    assert len(corpus.tune) == len(corpus.test) == 500


def test_bpe_is_trained_once(prose, tmp_path, monkeypatch):
    from tokenizers import trainers

    class NoTrainer:
        def __init__(self, **_):
            raise AssertionError("trained again")

    one = load_bpe(prose, tmp_path / "cache")
    monkeypatch.setattr(trainers, "BpeTrainer", NoTrainer)
    other = load_bpe(prose, tmp_path / "cache")
    assert one.digest == other.digest
    for part in PARTS:
        np.testing.assert_array_equal(getattr(one, part), getattr(other, part))
    with pytest.raises(AssertionError):
        load_bpe(prose, tmp_path / "cache", 301)
    write(tmp_path / "prose", {"0.txt": words(77, 600)})
    with pytest.raises(AssertionError):
        load_bpe(prose, tmp_path / "cache")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_damaged_cache_is_written_anew(prose, tmp_path, damage):
    one = load_bpe(prose, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_bytes()
    half = len(good) // 2
    flipped = good[:half] + bytes([good[half] ^ 255]) + good[half + 1 :]
    bad = {"truncated": good[:half], "flipped": flipped, "empty": b"", "text": b"{}"}[damage]
    file.write_bytes(bad)
    assert load_bpe(prose, tmp_path / "cache").digest == one.digest
    assert file.read_bytes() != bad
    assert data._cached(file) is not None
    assert list((tmp_path / "cache").iterdir()) == [file]


def test_cache_is_in_the_home_directory(prose, tmp_path, monkeypatch):
    monkeypatch.setattr(data.Path, "home", lambda: tmp_path / "home")
    load_bpe(prose, None)
    assert len(list((tmp_path / "home" / ".cache" / "pergrad").iterdir())) == 1


# Images.


def test_digits():
    digits = data.load_digits()
    for part, n in (("train", 1439), ("tune", 179), ("test", 179)):
        pixels, labels = getattr(digits, part)
        assert pixels.shape == (n, 8, 8, 1)
        assert pixels.dtype == np.float32
        assert pixels.min() == 0
        assert pixels.max() == 1
        assert labels.shape == (n,)
        assert labels.dtype == np.int32
        assert set(labels) == set(range(10))
    whole = np.concatenate([getattr(digits, part)[0] for part in PARTS]).reshape(-1, 64)
    assert len(np.unique(whole, axis=0)) == 1797  # no image is in two parts


def test_digits_go_by_the_seed():
    assert data.load_digits(3).digest == data.load_digits(3).digest != data.load_digits(4).digest
    np.testing.assert_array_equal(data.load_digits(3).test[0], data.load_digits(3).test[0])


def test_image_batches():
    digits = data.load_digits()
    pixels, labels = digits.train

    def flat(batch_size, seed=0):
        batches = data.image_batches(digits, batch_size=batch_size, seed=seed)
        taken = [batches[step] for step in range(-(-3000 // batch_size))]
        return [np.concatenate(arrays)[:3000] for arrays in zip(*taken, strict=True)]

    ours, same, other = flat(7), flat(64), flat(7, seed=1)
    for a, b in zip(ours, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(ours[1], other[1])
    label_of = {image.tobytes(): label for image, label in zip(pixels, labels, strict=True)}
    assert len(label_of) == 1439
    epoch = [image.tobytes() for image in ours[0][:1439]]
    assert set(epoch) == set(label_of)
    assert [label_of[image] for image in epoch] == ours[1][:1439].tolist()
    assert ours[0].dtype == np.float32
    assert ours[1].dtype == np.int32


# Errors say in one line which path it is, and the way out.


def fails(path, *says, **arguments):
    with pytest.raises(LabError) as error:
        data.load_text(str(path), **arguments)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in says:
        assert part in message


def test_nothing_found(tmp_path):
    fails(tmp_path / "missing.txt", "no text found", "stdlib")
    fails(tmp_path / "*.txt", "no text found")
    fails(tmp_path, "no text found")
    fails(write(tmp_path / "binary", {"a": b"\0", "b": b"\xff"}), "no text found")


def test_nothing_in_it(tmp_path):
    folder = write(tmp_path, {"a.txt": b"", "b.txt": b""})
    fails(folder, "nothing in it")
    fails(tmp_path / "a.txt", "nothing in it")


def test_cannot_be_read(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": b"abc"})
    forbid(monkeypatch, lambda path: True, data.Path.read_bytes)
    fails(tmp_path / "a.txt", "cannot be read (Permission denied)", "check its permissions")


def test_too_short_to_split(tmp_path):
    write(tmp_path, {"a.txt": b"abcdef"})
    fails(tmp_path / "a.txt", "too short", "give more text")


def test_too_short_for_a_window(folder):
    corpus = data.load_text(folder)
    with pytest.raises(LabError, match="too few for one window of 10000001; lower the context") as error:
        data.batches(corpus, context=10**7, batch_size=1, seed=0)
    assert str(error.value).startswith(folder)
    with pytest.raises(LabError, match="has 20 tokens, too few for one window of 21; lower the context"):
        data.validation_windows(corpus.tune[:20], context=20, limit=1)


@pytest.mark.parametrize("vocabulary", [-1, 256, 65537])
def test_bad_vocabulary(folder, vocabulary):
    fails(
        folder, f"a vocabulary of {vocabulary}", "from 257 to 65536", tokens="bpe", vocabulary=vocabulary
    )


def test_vocabulary_larger_than_the_text_gives(prose, tmp_path):
    fails(prose, "entries, not 5000", "or less", tokens="bpe", vocabulary=5000, cache_dir=tmp_path)


def test_bad_tokens(folder):
    fails(folder, "no tokens 'words'", '"bytes" or "bpe"', tokens="words")


def test_bpe_of_a_binary_file(tmp_path):
    write(tmp_path, {"x.bin": b"\xff" * 1000})
    fails(tmp_path / "x.bin", "needs UTF-8", 'tokens="bytes"', tokens="bpe", cache_dir=tmp_path)


def test_cache_that_cannot_be_written(prose, tmp_path):
    write(tmp_path, {"file": b""})
    with pytest.raises(LabError, match="give another cache_dir") as error:
        load_bpe(prose, tmp_path / "file")
    assert str(tmp_path / "file") in str(error.value)


@pytest.mark.parametrize("bad", [{"context": 0}, {"batch_size": 0}, {"seed": -1}])
def test_bad_numbers(bad):
    ((name, number),) = bad.items()
    with pytest.raises(LabError, match=f"{name} is {number}; choose"):
        data.batches(NUMBERS, **{"context": 4, "batch_size": 1, "seed": 0} | bad)
    with pytest.raises(LabError, match="limit is 0"):
        data.validation_windows(NUMBERS.tune, context=4, limit=0)


def test_photos(monkeypatch):
    """Blocks are in one part, with all their colours, and pieces come back together as the block."""
    monkeypatch.setattr(images, "_new", lambda part, train: part)
    photos = images.load_photos.__wrapped__()
    parts = {part: getattr(photos, part) for part in PARTS}
    assert {part: len(x) for part, x in parts.items()} == {"train": 19_968, "tune": 2496, "test": 2496}
    assert all(x.shape[1:] == (8, 8) and x.dtype == np.int32 for x in parts.values())
    assert min(x.min() for x in parts.values()) == 0 and max(x.max() for x in parts.values()) == 255
    block = np.arange(32 * 32 * 3).reshape(32, 32, 3)
    pieces = images.pieces(block)
    assert pieces.shape == (48, 8, 8)
    np.testing.assert_array_equal(pieces[0], block[:8, :8, 0])
    np.testing.assert_array_equal(pieces[16 + 4 + 1], block[8:16, 8:16, 1])
    np.testing.assert_array_equal(images.spread(np.arange(10), 5), [0, 2, 4, 6, 8])
    whole = np.concatenate([x.reshape(-1, 48 * 64) for x in parts.values()])  # a row for each block
    assert len(np.unique(whole, axis=0)) == len(whole) == 520


def test_no_piece_for_validation_occurs_in_training():
    photos = images.load_photos()
    known = {piece.tobytes() for piece in photos.train}
    for part in (photos.tune, photos.test):
        assert not any(piece.tobytes() in known for piece in part)
    assert (len(photos.train), len(photos.tune), len(photos.test)) == (19_968, 2493, 2489)


def test_batches_of_photos():
    photos = images.load_photos()

    def flat(batch_size):
        batches = images.batches(photos, batch_size=batch_size, seed=0)
        return np.concatenate([batches[step] for step in range(-(-300 // batch_size))])[:300]

    np.testing.assert_array_equal(flat(7), flat(64))
