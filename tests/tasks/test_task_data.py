"""Data of tasks: every kind of file is read, and what is broken is said, with where to get it."""

import contextlib
import gzip
import json
import lzma
import os
import sqlite3
import struct
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.cli import main
from fedgrad.core.errors import MissingExtra
from fedgrad.tasks import DataError, TaskError, prepare, task
from fedgrad.tasks import stackoverflow_tags as tags
from fedgrad.tasks.data import prepared_folder
from fedgrad.tasks.data.tff import parse_example
from where import ROOT

SHARED = ROOT.parent / "shared" / "data"
RNG = np.random.default_rng(0)

# ---- files as TFF writes them


def varint(n):
    n &= 2**64 - 1
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values, packed=True):
    if isinstance(values, bytes):
        return field(1, field(1, values))
    values = np.atleast_1d(values).ravel()
    if values.dtype.kind == "f":
        numbers = [struct.pack("<f", v) for v in values]
        if packed:
            return field(2, field(1, b"".join(numbers)))
        return field(2, b"".join(varint(1 << 3 | 5) + n for n in numbers))
    numbers = [varint(int(v)) for v in values]
    if packed:
        return field(3, field(1, b"".join(numbers)))
    return field(3, b"".join(varint(1 << 3) + n for n in numbers))


def example(packed=True, **features):
    entries = [
        field(1, field(1, name.encode()) + field(2, feature(value, packed)))
        for name, value in features.items()
    ]
    return field(1, b"".join(entries))


def test_an_example_of_tensorflow_is_parsed():
    features = {"a": np.array([0.5, -2.0], np.float32), "b": np.array([3, -1, 300]), "c": b"text"}
    for packed in (True, False):
        found = parse_example(example(packed, **features))
        np.testing.assert_array_equal(found["a"], features["a"])
        np.testing.assert_array_equal(found["b"], features["b"])
        assert found["c"] == [b"text"]
    # As TensorFlow itself serializes {"label": [7]}.
    known = bytes.fromhex("0a100a0e0a056c6162656c12051a030a0107")
    np.testing.assert_array_equal(parse_example(known)["label"], [7])


def database(path, rows, counts=None):
    """Rows are (split, client, serialized example)."""
    if counts is None:
        counts = {}
        for split, client, _ in rows:
            counts[split, client] = counts.get((split, client), 0) + 1
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, "
                     "serialized_example_proto BLOB)")  # fmt: skip
        file.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, "
                     "num_examples INTEGER)")  # fmt: skip
        file.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        file.executemany(
            "INSERT INTO client_metadata VALUES (?, ?, ?)",
            [(client, split, n) for (split, client), n in counts.items()],
        )
    file.close()
    return path


PIXELS = np.round(RNG.uniform(0, 1, (4, 28, 28)) * 255) / 255


def emnist_rows():
    rows = []
    for split, sizes in (("train", (3, 2, 4)), ("test", (1, 2, 1))):
        for client, size in enumerate(sizes):
            for i in range(size):
                made = example(pixels=PIXELS[i].astype(np.float32), label=np.array(10 * client + i))
                rows.append((split, f"f{client}", made))
    return rows


SENTENCES = ["the cat sat on the mat", "a cat is a cat", "the dog sat", "on and on"]


def stackoverflow_rows():
    rows = []
    for split, clients in (("train", 3), ("heldout", 2), ("test", 2)):
        for client in range(clients):
            for i in range(2):
                sentence = SENTENCES[(client + i) % 4].encode()
                features = {"tokens": sentence, "tags": b"python|jax", "title": b"cat", "score": 1}
                rows.append((split, f"{split}{client}", example(**features)))
    return rows


TFF = {
    "emnist": emnist_rows,
    "cifar100": lambda: [
        (
            split,
            f"{split}{client}",
            example(image=np.full((32, 32, 3), 8 * i), label=np.array(i), coarse_label=np.array(4)),
        )
        for split, clients in (("train", 3), ("test", 2))
        for client in range(clients)
        for i in range(3)
    ],
    "shakespeare": lambda: [
        (split, f"ROLE{client}", example(snippets=(line * (client + 1)).encode()))
        for split in ("train", "test")
        for client in range(3)
        for line in ("To be, or not to be: that is the question. ", "Words, words, words.")
    ],
    "stackoverflow_words": stackoverflow_rows,
    "stackoverflow_tags": stackoverflow_rows,
}


def rows_of(population, client):
    cohort = population.select(np.array([client]))
    begin, count = int(cohort.offset[0]), int(cohort.count[0])
    return jax.tree.map(lambda x: np.asarray(x[begin : begin + count]), cohort.store)


def assert_same(a, b):
    for one, other in zip(
        (a.train, a.test, a.validation), (b.train, b.test, b.validation), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one.counts, other.counts)
            for client in range(len(one)):
                jax.tree.map(
                    np.testing.assert_array_equal, rows_of(one, client), rows_of(other, client)
                )


@pytest.mark.parametrize("name", TFF)
def test_files_of_tff_are_read_compressed_or_not_and_prepared(name, tmp_path):
    plain = database(tmp_path / "data.sqlite", TFF[name]())
    packed = tmp_path / "data.sqlite.lzma"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    made = task(name, data=plain)
    assert len(made.train) == 3 and len(made.test) == (
        3 if name in ("emnist", "shakespeare") else 2
    )
    assert (made.validation is not None) == name.startswith("stackoverflow")
    assert str(plain) in made.about
    assert_same(made, task(name, data=packed))
    counts = prepare(name, packed, tmp_path / "prepared")
    assert counts["train"] == 3
    opened = task(name, data=tmp_path / "prepared")
    assert_same(made, opened)
    params = opened.init(jax.random.key(0))
    assert np.isfinite(jax.jit(made.loss)(params, rows_of(opened.train, 0))).all()
    assert len(task(name, data=plain, clients=2).train) == 2


def test_what_the_examples_are(tmp_path):
    emnist = task("emnist", data=database(tmp_path / "e", emnist_rows()))
    first = rows_of(emnist.train, 0)
    np.testing.assert_array_equal(first["x"], np.round(255 * PIXELS[:3]))
    assert first["x"].dtype == np.uint8 and first["y"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(emnist.train.counts, [3, 2, 4])
    cifar = task("cifar100", data=database(tmp_path / "c", TFF["cifar100"]()))
    assert rows_of(cifar.train, 0)["x"].shape == (3, 24, 24, 3)
    assert rows_of(cifar.train, 1)["x"][2].max() == 16
    play = task("shakespeare", data=database(tmp_path / "s", TFF["shakespeare"]()))
    two = rows_of(play.train, 0)
    assert two["x"].shape == (2, 80) and two["x"][0, 0] == 2  # the beginning
    np.testing.assert_array_equal(two["x"][:, 1:], two["y"][:, :-1])
    assert two["y"][1, 20] == 3 and not two["y"][1, 21:].any()  # the end, and padding
    words = task("stackoverflow_words", data=database(tmp_path / "w", stackoverflow_rows()))
    sentence = rows_of(words.train, 0)  # "the cat sat on the mat"; "the" and "cat" are frequent
    assert sentence["x"].shape == (2, 20) and sentence["x"].dtype == np.int16
    assert sentence["x"][0, 1] == sentence["x"][0, 5] and sentence["x"][0, 1] >= 4
    tags = task("stackoverflow_tags", data=database(tmp_path / "t", stackoverflow_rows()))
    assert rows_of(tags.train, 0)["y"].tolist() == [[1, 0, -1, -1, -1]] * 2  # jax, python


# ---- LEAF, npz, lines


def leaf(folder, name, users):
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(u["y"]) for u in users.values()],
        "user_data": users,
    }
    (folder / name).write_text(json.dumps(content))
    return folder / name


def writers(names, size=4):
    return {n: {"x": PIXELS[:size].reshape(size, -1).tolist(), "y": [3] * size} for n in names}


def test_files_and_folders_of_leaf_are_read(tmp_path):
    one = leaf(tmp_path, "all.json", writers(["a", "b"]))
    made = task("emnist", data=one)
    assert len(made.train) == 2 and made.train.counts.tolist() == [3, 3]
    np.testing.assert_array_equal(made.test.counts, [1, 1])  # a fifth is held out
    leaf(tmp_path / "parts" / "train", "1.json", writers(["a", "b"], 3))
    leaf(tmp_path / "parts" / "train", "2.json", writers(["c"], 2))
    leaf(tmp_path / "parts" / "test", "1.json", writers(["a", "b"], 1))
    made = task("emnist", data=str(tmp_path / "parts"))
    assert made.train.counts.tolist() == [3, 3, 2] and made.test.counts.tolist() == [1, 1]
    plays = {"x": ["to be or not to be, that is the question ".ljust(80)] * 2, "y": ["a", "b"]}
    made = task("shakespeare", data=leaf(tmp_path, "plays.json", {"r": plays}))
    assert made.train.counts.tolist() == [1]
    assert (rows_of(made.train, 0)["y"][0, :-1] == rows_of(made.train, 0)["x"][0, 1:]).all()


def test_arrays_are_read_by_client_or_divided(tmp_path):
    client = np.repeat([2, 0, 1], [5, 3, 4])
    pixels = RNG.integers(0, 256, (12, 28, 28), np.uint8)
    np.savez(tmp_path / "e.npz", pixels=pixels, label=np.arange(12), client=client, who=["a", "b"])
    made = task("emnist", data=tmp_path / "e.npz")
    assert (made.train.counts + made.test.counts).tolist() == [3, 4, 5]
    together = np.concatenate([rows_of(p, 0)["y"] for p in (made.train, made.test)])
    assert sorted(together) == [5, 6, 7]
    images = RNG.integers(0, 256, (60, 32, 32, 3), np.uint8)
    parts = {"train_image": images, "train_label": np.arange(60), "test_image": images[:20],
             "test_label": np.arange(20)}  # fmt: skip
    np.savez_compressed(tmp_path / "c.npz", **parts)
    made = task("cifar100", data=tmp_path / "c.npz", clients=4)
    assert made.train.counts.tolist() == [15] * 4 and made.test.counts.tolist() == [5] * 4
    with pytest.raises(DataError, match="give it an array 'client'"):
        np.savez(tmp_path / "n.npz", pixels=pixels, label=np.arange(12))
        task("emnist", data=tmp_path / "n.npz")


def test_lines_and_lists_of_json_are_read(tmp_path):
    lines = [
        {"client_id": f"u{i % 3}", "tokens": SENTENCES[i % 4], "tags": "a|b"} for i in range(9)
    ]
    path = tmp_path / "lines.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    for name in ("stackoverflow_words", "stackoverflow_tags"):
        made = task(name, data=path)
        assert (made.train.counts + made.test.counts).tolist() == [3, 3, 3]
    (tmp_path / "roles.json").write_text(json.dumps({"A": SENTENCES, "B": SENTENCES[:2]}))
    made = task("shakespeare", data=tmp_path / "roles.json")
    assert (made.train.counts + made.test.counts).tolist() == [4, 2]


def test_validation_clients_are_a_population_of_their_own(tmp_path):
    made = task("emnist", clients=20, validation=0.3)
    assert len(made.train) + len(made.validation) == 20 and len(made.validation) >= 2
    assert len(made.test) == len(made.train)  # those who validate have all their examples
    path = database(tmp_path / "w", stackoverflow_rows())
    with pytest.raises(DataError, match="validation clients of its own"):
        task("stackoverflow_words", data=path, validation=0.5)


# ---- what is broken


def truncated(path, at=0.6):
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * at)])
    return path


def wrong_schema(path):
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE people (name TEXT)")
    file.close()
    return path


def packed(path, rows):
    plain = database(path.with_suffix(".plain"), rows)
    path.write_bytes(lzma.compress(plain.read_bytes()))
    return path


def written(path, content):
    path.write_bytes(content)
    return path


def zipped(path):
    np.savez(path, pixels=np.zeros((50, 28, 28)), label=np.arange(50), client=np.arange(50))
    return path


def half(path):
    file = leaf(path.parent, path.name, writers(["a", "b"]))
    content = json.loads(file.read_text())
    del content["user_data"]["b"]
    return written(file, json.dumps(content).encode())


def as_json(path, content):
    return written(path, json.dumps(content).encode())


def as_arrays(path, **arrays):
    path = path.with_suffix(".npz")
    np.savez(path, **arrays)
    return path


def locked(path):
    """Its entries are flagged as encrypted."""
    content = bytearray(zipped(path.with_suffix(".npz")).read_bytes())
    for begin, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        place = content.find(begin)
        while place >= 0:
            content[place + flags] |= 1
            place = content.find(begin, place + 4)
    return written(path, bytes(content))


TWO = {"x": [[0.5] * 784] * 2, "y": [1, 2]}
BAD = [("train", "a", example(pixels=np.zeros(9, np.float32), label=np.array(1)))]
BROKEN = {
    "missing": (lambda p: p, "cannot be opened: No such file"),
    "empty": (lambda p: written(p, b""), "is empty"),
    "not a database": (lambda p: written(p, b"hello " * 99), "neither sqlite, lzma, npz nor JSON"),
    "a truncated database": (
        lambda p: truncated(database(p, emnist_rows() * 9)),
        "cannot be read as a database|not whole",
    ),
    "a database of something else": (wrong_schema, "has no table client_metadata nor examples"),
    "no clients": (lambda p: database(p, []), "no examples to train on"),
    "fewer examples than there should be": (
        lambda p: database(p, emnist_rows()[:2], {("train", "f0"): 3}),
        "has 2 examples in train, and should have 3",
    ),
    "fewer clients than there should be": (
        lambda p: database(p, emnist_rows()[:3], {("train", "f0"): 3, ("train", "f1"): 2}),
        "should have those of 2",
    ),
    "no example of TensorFlow": (
        lambda p: database(p, [("train", "a", b"\xff\x01hello")]),
        "is no tf.train.Example",
    ),
    "an example that ends too early": (
        lambda p: database(p, [("train", "a", emnist_rows()[0][2][:99])]),
        "is no tf.train.Example: it ends too early",
    ),
    "a split of another name": (
        lambda p: database(p, [("practice", "a", emnist_rows()[0][2])]),
        "part 'practice'",
    ),
    "images of another size": (lambda p: database(p, BAD), r"client 'a': images of shape \(9,\)"),
    "other columns": (
        lambda p: database(p, stackoverflow_rows()),
        "has no pixels nor image nor x, but score",
    ),
    "a label out of range": (
        lambda p: database(p, [("train", "a", example(pixels=PIXELS[0], label=np.array(62)))]),
        "not from 0 to 61",
    ),
    "truncated lzma": (lambda p: truncated(packed(p, emnist_rows())), "cannot be decompressed"),
    "lzma of something else": (
        lambda p: written(p, lzma.compress(b"hello")),
        "cannot be read as a database",
    ),
    "truncated npz": (lambda p: truncated(zipped(p.with_suffix(".npz"))), "be read as npz"),
    "truncated JSON": (
        lambda p: truncated(leaf(p.parent, p.name, writers(["a", "b"]))),
        "is no JSON",
    ),
    "half of LEAF": (half, "do not name the same clients"),
    "truncated gzip": (
        lambda p: truncated(written(p, gzip.compress(bytes(RNG.bytes(999))))),
        "cannot be read",
    ),
    "LEAF that names a client twice": (
        lambda p: as_json(p, {"users": ["a"] * 2, "num_samples": [2] * 2, "user_data": {"a": TWO}}),
        "do not name the same clients",
    ),
    "LEAF of another shape": (
        lambda p: as_json(p, {"users": ["a"], "num_samples": [2], "user_data": {"a": [1, 2]}}),
        "client 'a' has no columns by name",
    ),
    "LEAF without users": (
        lambda p: as_json(p, {"users": 1, "num_samples": [2], "user_data": {}}),
        "is not LEAF's",
    ),
    "more labels than images": (
        lambda p: as_json(p, {"a": TWO | {"y": [1, 2, 3]}}),
        "client 'a': has not one of each for every example: 2 of x, 3 of y",
    ),
    "a text that is no list": (
        lambda p: as_json(p, {"a": TWO | {"x": "Good morrow"}}),
        "client 'a': x is no list of examples",
    ),
    "JSON that is nested deep": (lambda p: written(p, b"[" * 99_999), "nested too deep"),
    "a line without a label": (
        lambda p: written(p, b'{"client_id": 1, "x": [], "y": 1}\n{"client_id": 1, "x": []}'),
        "client '1': ",
    ),
    "a feature without a value": (
        lambda p: database(p, [("train", "a", b"\n\n\n\x08\n\x06pixels")]),
        "is no tf.train.Example",
    ),
    "objects in an npz": (
        lambda p: as_arrays(p, pixels=np.array([print] * 2), label=[1, 2], client=[0, 0]),
        "Object arrays cannot be loaded",
    ),
    "clients in a matrix": (
        lambda p: as_arrays(p, pixels=PIXELS[:2], label=[1, 2], client=[[0], [0]]),
        r"'client' says whose each example is.*shape \(2, 1\)",
    ),
    "an npz that is locked": (locked, "be read as npz: .*password"),
    "lines of nobody": (
        lambda p: written(p, b'{"pixels": [1]}\n{"pixels": [2]}'),
        ":1 does not name its client",
    ),
    "an empty folder": (lambda p: p.mkdir() or p, "neither a prepared folder nor one of LEAF's"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_broken_is_said_with_where_to_get_it(broken, tmp_path):
    make, message = BROKEN[broken]
    path = make(tmp_path / "data")
    with pytest.raises(DataError, match=message) as caught:
        task("emnist", data=path)
    assert "test_task_data.py:" in str(caught.value) and "emnist_all.sqlite.lzma" in str(
        caught.value
    )
    with pytest.raises(DataError):
        prepare("emnist", path, tmp_path / "out")
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]  # nothing is half there


IMAGES = RNG.integers(0, 255, (60, 32, 32, 3)).astype(np.uint8)
BROKEN_IMAGES = {
    "channels first": (
        {"image": IMAGES.transpose(0, 3, 1, 2), "label": np.arange(60)},
        r"images of shape \(3, 32, 32\), not \(32, 32, 3\)",
    ),
    "no labels": ({"image": IMAGES}, "has no label nor fine_label nor y, but image"),
    "fewer labels": ({"image": IMAGES, "label": np.arange(50)}, "60 of image, 50 of label"),
    "more labels": ({"image": IMAGES[:50], "label": np.arange(60)}, "50 of image, 60 of label"),
    "labels out of range": ({"image": IMAGES, "label": np.arange(60) + 60}, "not from 0 to 99"),
}


@pytest.mark.parametrize("broken", BROKEN_IMAGES)
def test_images_of_nobody_that_are_broken(broken, tmp_path):
    arrays, message = BROKEN_IMAGES[broken]
    with pytest.raises(DataError, match=message):
        task("cifar100", data=as_arrays(tmp_path / "data", **arrays))


def test_clients_without_examples_are_left_out(tmp_path):
    none = {"x": [], "y": []}
    clients = {"users": ["a", "b"], "num_samples": [2, 0], "user_data": {"a": TWO, "b": none}}
    assert len(task("emnist", data=as_json(tmp_path / "a", clients)).train) == 1


def test_lines_end_where_lines_of_json_end(tmp_path):
    said = [{"client_id": "a", "x": text} for text in ("Good\u2028morrow", "Well\x85met", "Ay")]
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in said)
    several = task("shakespeare", data=written(tmp_path / "a", f"{lines}\n\n".encode()))
    assert several.train.counts.sum() + several.test.counts.sum() == 3
    assert len(task("shakespeare", data=as_json(tmp_path / "b", said[0])).train) == 1


@pytest.mark.parametrize(
    "wrong", [{"clients": "5"}, {"clients": 2.5}, {"validation": "0.1"}, {"seed": -1}]
)
def test_options_of_another_kind(wrong):
    with pytest.raises(TaskError, match=rf"{next(iter(wrong))[:-1]}.*{next(iter(wrong.values()))}"):
        task("emnist", **wrong)


def test_a_tag_counts_once():
    columns = {"x": ["how do I"], "y": ["jax|jax"]}
    made = tags.DATA.convert(columns, {"words": {}, "tags": {"jax": 0, "python": 1}})
    assert made["y"].tolist() == [[0, -1, -1, -1, -1]]


def test_words_that_are_none_are_said_while_they_are_counted(tmp_path):
    path = leaf(tmp_path, "femnist.json", writers(["a", "b"]))
    for name in ("stackoverflow_words", "stackoverflow_tags"):
        with pytest.raises(DataError, match="client 'a': texts are expected, got list"):
            task(name, data=path)
    with pytest.raises(DataError, match="client 'a': has no tokens nor x, but label, pixels"):
        task("stackoverflow_words", data=database(tmp_path / "b", BAD[:1], {("train", "a"): 1}))


# ---- prepared folders


def test_who_is_interrupted_leaves_nothing(tmp_path):
    path = database(tmp_path / "e", emnist_rows())

    def interrupt(what, done, total):
        if done == 4:
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        prepare("emnist", path, tmp_path / "out", tick=interrupt)
    assert sorted(tmp_path.iterdir()) == before
    prepare("emnist", path, tmp_path / "out")
    with pytest.raises(DataError, match="exists already"):
        prepare("emnist", path, tmp_path / "out")
    with pytest.raises(TaskError, match="prepared already"):
        prepare("emnist", tmp_path / "out", tmp_path / "again")
    with pytest.raises(DataError, match="prepared for the task 'emnist', not for 'cifar100'"):
        task("cifar100", data=tmp_path / "out")
    with pytest.raises(TaskError, match="clients= and validation= have no effect"):
        task("emnist", data=tmp_path / "out", clients=3)
    with pytest.raises(TaskError, match="nor has seed="):
        task("emnist", data=tmp_path / "out", seed=1)
    with pytest.raises(fg.StoreError, match="Stores are within it: test, train"):
        fg.stored(tmp_path / "out")
    for clients in ({"train": 4, "test": 3}, {"test": 3}, None):
        header = {"format": prepared_folder.FORMAT, "task": "emnist", "clients": clients}
        (tmp_path / "out" / prepared_folder.HEADER).write_text(json.dumps(header))
        with pytest.raises(DataError, match=r"is not whole: it has|is broken"):
            task("emnist", data=tmp_path / "out")
    (tmp_path / "out" / prepared_folder.HEADER).write_text("{")
    with pytest.raises(DataError, match=r"prepared.json is broken"):
        task("emnist", data=tmp_path / "out")
    with pytest.raises(TaskError, match="Did you mean 'emnist'"):
        prepare("emnis", path, tmp_path / "other")


def test_a_folder_that_cannot_be_written(tmp_path):
    path = database(tmp_path / "e", emnist_rows())
    with pytest.raises(TaskError, match="cannot be written: Not a directory") as caught:
        prepare("emnist", path, path / "out")
    assert "Get " not in str(caught.value)  # the data are well


@contextlib.contextmanager
def without_rights(folder):
    """As somebody who may neither read nor write there."""
    folder.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


def test_what_is_not_ones_own(tmp_path):
    path = database(tmp_path / "e", emnist_rows())
    clients = [{"x": np.ones(3)}]
    tries = {
        "e cannot be opened: Permission denied": lambda: task("emnist", data=path),
        "s cannot be read: Permission denied": lambda: fg.stored(tmp_path / "s"),
        "n cannot be written: Permission denied": lambda: fg.store(tmp_path / "n", clients),
    }
    with without_rights(tmp_path):
        for message, attempt in tries.items():
            with pytest.raises(fg.FederatedError, match=message):
                attempt()


ENDED = """
import os, signal, sys
from fedgrad.cli import data_command
from fedgrad.cli.dispatch import main
prepare = data_command.prepare
def ended(*args, tick, **more):
    def end(what, done, total):
        if done == 4:
            os.kill(os.getpid(), signal.SIGTERM)
    return prepare(*args, tick=end, **more)
data_command.prepare = ended
sys.exit(main(["data", "prepare", "emnist", "--from", sys.argv[1], "--out", sys.argv[2]]))
"""


def test_who_is_ended_leaves_nothing(tmp_path):
    path = packed(tmp_path / "e", emnist_rows())
    (tmp_path / "temporary").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", ENDED, str(path), str(tmp_path / "out")],
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        check=False,
    )
    assert done.returncode == 130
    assert sorted(tmp_path.rglob("*")) == before


def test_a_prepared_folder_is_trained_on_like_what_it_was_made_of(tmp_path):
    path = database(tmp_path / "e", emnist_rows())
    assert (
        main(["data", "prepare", "emnist", "--from", str(path), "--out", str(tmp_path / "o")]) == 0
    )
    losses = []
    for data in (path, tmp_path / "o"):
        made = task("emnist", data=data)
        algorithm = fg.fed_avg(made.loss, fg.local_training(0.1, batch_size=2))
        first = made.init(jax.random.key(0))
        key = jax.random.key(1)
        done = fg.fit(algorithm, made.train, params=first, rounds=2, cohort_size=2, key=key,
                      progress=False)  # fmt: skip
        losses.append(done.history["loss"])
    np.testing.assert_array_equal(*losses)


def test_the_command_prepares_and_says_what_is_wrong(tmp_path, capsys):
    path = database(tmp_path / "e", emnist_rows())
    words = ["data", "prepare", "emnist", "--from", str(path), "--out"]
    assert main([*words, str(tmp_path / "a")]) == 0
    said = capsys.readouterr()
    assert "3 to train" in said.out and "converting clients" in said.err
    assert main([*words, str(tmp_path / "b"), "--json", "--clients", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["clients"] == {"test": 2, "train": 2}
    assert main([*words, str(tmp_path / "a")]) == 1
    assert "exists already" in capsys.readouterr().err
    for wrong in (["data", "prepare", "emnis"], ["data", "show", "emnist"]):
        with pytest.raises(SystemExit):
            main([*wrong, "--from", "x", "--out", "y"])
        assert "There is no" in capsys.readouterr().err


# ---- Hugging Face


class Rows:
    """What `datasets.Dataset` has that is used."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, name):
        return self.columns[name]


class FederatedDataset:
    def __init__(self, dataset, partitioners):
        assert dataset == "flwrlabs/femnist"
        self.partitioners = partitioners

    def load_partition(self, i):
        return Rows(image=list(PIXELS), character=[i] * 4, writer_id=[f"w{i}"] * 4)


class NaturalIdPartitioner:
    num_partitions = 3

    def __init__(self, partition_by):
        assert partition_by == "writer_id"


def test_hugging_face_is_read_by_way_of_flowers_data_sets(monkeypatch):
    partitioner = types.SimpleNamespace(NaturalIdPartitioner=NaturalIdPartitioner)
    found = types.SimpleNamespace(FederatedDataset=FederatedDataset, partitioner=partitioner)
    monkeypatch.setitem(sys.modules, "flwr_datasets", found)
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", partitioner)
    made = task("emnist", data="huggingface")
    assert (made.train.counts + made.test.counts).tolist() == [4, 4, 4]
    own = FederatedDataset("flwrlabs/femnist", {"train": NaturalIdPartitioner("writer_id")})
    assert_same(made, task("emnist", data=own))
    images = list(RNG.integers(0, 256, (40, 32, 32, 3)))
    parts = {"train": Rows(img=images, fine_label=list(range(40))),
             "test": Rows(img=images[:20], fine_label=list(range(20)))}  # fmt: skip
    monkeypatch.setitem(
        sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda n: parts)
    )
    made = task("cifar100", data="huggingface")
    assert made.train.counts.tolist() == [20, 20] and made.test.counts.tolist() == [20]


def test_hugging_face_out_of_reach_or_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedgrad\[huggingface\]'"):
        task("emnist", data="huggingface")

    def offline(name):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(DataError, match=r"cannot be had: ConnectionError: .* Get cifar100"):
        task("cifar100", data="huggingface")
    with pytest.raises(DataError, match="no data set for stackoverflow_words"):
        task("stackoverflow_words", data="huggingface")


# ---- real data, where they are

REAL = {
    "emnist": ("femnist_62_by_writer.npz", 400),
    "cifar100": ("cifar100_small.npz", 500),
    "shakespeare": ("shakespeare_roles.json.gz", 1076),
    "stackoverflow_words": ("stackexchange_sentences.jsonl.gz", 5681),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data_are_read(name):
    file, clients = REAL[name]
    if not (SHARED / file).exists():
        pytest.skip(f"{SHARED / file} is not here")
    made = task(name, data=SHARED / file)
    assert len(made.train) == clients
    params = made.init(jax.random.key(0))
    loss = jax.jit(made.loss)(params, rows_of(made.train, 0))
    assert np.isfinite(loss).all()
