"""Clients on disk: the numbers of a population in memory, of which only cohorts are in memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.clients import folder, on_disk, prefetch
from fedgrad.clients.stored import Writer
from fedgrad.training import progress
from laws import EXECUTORS, every_executor
from line import FIRST, line, mean_square, points
from where import TESTS

POINTS = points(40)
MEMORY = fg.population(POINTS)
KEY = jax.random.key(5)
LINE = line().starting({"rate": 0.1, "noise": 0.0})
SETTINGS = {"params": FIRST, "cohort_size": 5, "key": KEY, "progress": False}


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return fg.store(tmp_path_factory.mktemp("stored") / "clients", iter(POINTS))


def train(algorithm, clients, rounds=6, **more):
    return fg.fit(algorithm, clients, rounds=rounds, **{**SETTINGS, **more})


def require_same(found, wanted):
    """Runs that agree in every bit."""
    assert found.history.keys() == wanted.history.keys()
    for name in wanted.history.keys() - {"seconds"}:
        np.testing.assert_array_equal(found.history[name], wanted.history[name], err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


# --- the same numbers -----------------------------------------------------------------------------


@fg.program(data=fg.CLIENTS)
def squares(w, data):
    model = {"w": fg.broadcast(w)}

    def add(total, batch, mask):
        return total + jnp.sum(jnp.where(mask, mean_square(model, batch), 0))

    total = data.fold(add, jnp.zeros((), w.dtype), 4, key=fg.client_key(KEY))
    return fg.mean(total, weights=data.count.astype(w.dtype))


@every_executor
@pytest.mark.parametrize("program", [squares, fg.grad(squares)], ids=["value", "gradient"])
def test_programs(disk, executor, program):
    w = jnp.asarray([0.5, -1.0, 2.0], jnp.float32)
    for clients in ([3, 1, 39], [0, 1, 2], [7, 7, 7]):
        found, wanted = (
            program.on(executor)(w, population.select(clients)) for population in (disk, MEMORY)
        )
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)


@every_executor
def test_fit(disk, executor):
    algorithm = (line() if executor == EXECUTORS["reference"] else fed_avg()).on(executor)
    rounds = 2 if executor == EXECUTORS["reference"] else 6
    require_same(train(algorithm, disk, rounds), train(algorithm, MEMORY, rounds))


def fed_avg():
    return fg.fed_avgm(mean_square, fg.local_training(0.05, batch_size=4), 0.5)


@pytest.mark.parametrize("others", [False, True], ids=["fresh clients", "other clients"])
def test_self_tuning(disk, others, tmp_path):
    """The cohort whose loss is asked is drawn of the same clients, or of others."""
    more = points(9, seed=1)
    pairs = [(disk, fg.store(tmp_path / "more", more)), (MEMORY, fg.population(more))]
    found = []
    for clients, other in pairs:
        tuned = fg.self_tuning(
            fed_avg(),
            learn=["server.learning_rate"],
            gradient_from=other if others else "fresh",
        )
        found.append(train(tuned, clients))
    require_same(*found)


def test_what_clients_keep(disk):
    algorithm = fg.scaffold(mean_square, 0.05)
    require_same(train(algorithm, disk), train(algorithm, MEMORY))


def test_a_search(disk):
    def search(clients):
        return fg.random_search(
            LINE,
            clients,
            {"rate": fg.log_uniform(1e-3, 1e-1)},
            trials=3,
            rounds=3,
            evaluate=fg.Evaluation({"loss": mean_square}, clients),
            **SETTINGS,
        )

    found, wanted = search(disk), search(MEMORY)
    assert np.array_equal(found.scores, wanted.scores) and not loading()


def test_a_run_that_is_resumed(disk, tmp_path):
    whole = train(LINE, MEMORY, 8)
    train(LINE, disk, 3, out=tmp_path / "run")
    again = train(LINE, fg.stored(disk.folder.path), 8, out=tmp_path / "run")
    require_same(again, whole)
    other = fg.store(tmp_path / "other", [*POINTS[:-1], {**POINTS[-1], "y": POINTS[-1]["y"] + 1}])
    with pytest.raises(fg.FederatedError, match="clients have other examples"):
        train(LINE, other, 9, out=tmp_path / "run")


ON_FOUR_DEVICES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
sys.path.insert(0, sys.argv[2])
import numpy as np
import fedgrad as fg
from line import FIRST, line, mean_square, points
disk, memory = fg.stored(sys.argv[1]), fg.population(points(40))
for executor in (fg.executors.local(), fg.executors.mesh()):
    found, wanted = (
        fg.fit(line().on(executor), clients, params=FIRST, rounds=4, cohort_size=7, progress=False,
               key=jax.random.key(0), evaluate=fg.Evaluation({"loss": mean_square}, clients))
        for clients in (disk, memory)
    )
    assert found.history["loss"].tolist() == wanted.history["loss"].tolist()
    assert found.history["eval.loss"].tolist() == wanted.history["eval.loss"].tolist()
    assert np.array_equal(found.params["w"], wanted.params["w"])
print("the same")
"""


def test_on_several_devices(disk):
    here = str(TESTS)
    command = [sys.executable, "-c", ON_FOUR_DEVICES, str(disk.folder.path), here]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "the same\n", done.stderr


# --- evaluation -----------------------------------------------------------------------------------


def test_evaluation_of_all_and_of_some(disk):
    model = {"w": jnp.asarray([0.5, -1.0, 2.0], jnp.float32)}
    for some in (lambda clients: clients, lambda clients: clients.sample(KEY, 7)):
        found, wanted = (
            fg.Evaluation({"loss": mean_square}, some(clients))(model) for clients in (disk, MEMORY)
        )
        assert np.array_equal(found["loss"], wanted["loss"])


def test_evaluation_portion_by_portion(disk, monkeypatch):
    """What is more than a portion is never on the device together, nor compiled for more than a
    few times, and one sees how far it is."""
    monkeypatch.setattr(on_disk, "PORTION", disk.bytes // 6)
    portions = list(disk.portions())
    assert len(portions) > 5
    sizes = [len(portion) for portion in portions]
    assert sum(sizes) == len(disk) and len(set(sizes[:-1])) == 1
    assert np.concatenate([p.index for p in portions]).tolist() == list(range(len(disk)))
    model = {"w": jnp.asarray([0.5, -1.0, 2.0], jnp.float32)}
    traced, told = [], []

    def loss(params, batch):
        traced.append(1)
        return mean_square(params, batch)

    ratio = fg.Ratio(mean_square, lambda params, batch: batch["y"] ** 2)  # of two sums, not a mean
    evaluation = fg.Evaluation({"loss": loss, "ratio": ratio}, disk)
    found = evaluation(model, lambda done, there: told.append((done, there)))
    assert told == [(min(n, 40), 40) for n in np.cumsum(sizes).tolist()]
    assert len(traced) <= 4
    before = len(traced)
    again = evaluation(jax.tree.map(lambda x: 2 * x, model))
    assert len(traced) == before and again["loss"] != found["loss"]
    wanted = fg.Evaluation({"loss": mean_square, "ratio": ratio}, MEMORY)(model)
    for name in ("loss", "ratio"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
        assert found[name].dtype == wanted[name].dtype
    models = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), model)
    both = evaluation.side_by_side()(models)
    assert both["loss"].tolist() == [found["loss"], again["loss"]]
    assert not loading()


def test_portions_in_fit(disk, monkeypatch, capsys):
    monkeypatch.setattr(on_disk, "PORTION", disk.bytes // 6)
    plain = progress._plain
    monkeypatch.setattr(progress, "_plain", lambda rounds: plain(rounds)._replace(seconds=0.0))
    found, wanted = (
        train(LINE, c, evaluate=fg.Evaluation({"loss": mean_square}, c, every=2), progress=True)
        for c in (disk, MEMORY)
    )
    assert "/6 · evaluating, 40 of 40 clients" in capsys.readouterr().err
    np.testing.assert_allclose(found.history["eval.loss"], wanted.history["eval.loss"], rtol=1e-6)
    assert not loading()


def test_everyone_is_refused_where_that_is_too_much(disk, monkeypatch):
    monkeypatch.setattr(on_disk, "EVERYONE", 100)
    large = fg.stored(disk.folder.path)
    with pytest.raises(fg.CohortError, match=r"All 40 clients.*GiB.*sample\(key.*fg\.Evaluation"):
        _ = large.everyone


# --- what it costs --------------------------------------------------------------------------------


def uneven(clients=60):
    """A few clients have many more examples than the others."""
    random = np.random.default_rng(2)
    sizes = np.where(random.random(clients) < 0.05, 200, random.integers(1, 12, clients))
    rows = [random.normal(size=(n, 3)).astype(np.float32) for n in sizes]
    return [{"x": x, "y": x[:, 0]} for x in rows]


def test_rounds_are_compiled_once(tmp_path):
    clients, traced = fg.store(tmp_path / "uneven", uneven()), []

    def loss(params, batch):
        traced.append(1)
        return mean_square(params, batch)

    algorithm = fg.fed_avg(loss, fg.local_training(0.01, batch_size=4))
    train(algorithm, clients, 1)
    before = len(traced)
    train(algorithm, clients, 30, key=jax.random.key(8))
    assert len(traced) == before


def test_the_number_of_shapes_is_bounded(tmp_path):
    clients = fg.store(tmp_path / "uneven", uneven())
    by_size = np.argsort(clients.counts)
    shapes = {
        len(clients.select(by_size[start : start + 8]).store["x"])
        for start in range(len(clients) - 7)
    }
    assert len(shapes) <= 3
    largest = clients.select(np.repeat(by_size[-1:], 8))  # more than different clients can have
    assert len(largest.store["x"]) >= 9 * clients.counts.max()


def test_memory_is_bounded(tmp_path, monkeypatch):
    """However long it trains, only the buffers of the rounds in line are there."""
    made, most, aligned = [], [], folder._aligned

    def counted(shape, dtype):
        array = aligned(shape, dtype)
        made.append(weakref.ref(array.base if array.base is not None else array))
        most.append(sum(ref() is not None for ref in made))
        return array

    monkeypatch.setattr(folder, "_aligned", counted)
    clients = fg.store(tmp_path / "clients", POINTS)
    train(LINE, clients, 60)
    assert len(made) >= 2 * 60  # two leaves
    assert max(most) <= 2 * (8 + prefetch.AHEAD + 3)  # rounds that are started, loaded, and at hand


def test_the_writer_needs_the_memory_of_a_client(tmp_path):
    made = []

    def clients():
        for i in range(50):
            array = np.full((3, 4), i, np.uint8)
            made.append(weakref.ref(array))
            yield {"x": array}
            del array
            assert sum(ref() is not None for ref in made) <= 2

    assert len(fg.store(tmp_path / "clients", clients())) == 50


# --- the thread -----------------------------------------------------------------------------------


def loading():
    return [t.name for t in threading.enumerate() if t.name.startswith("fedgrad-prefetch")]


@pytest.mark.parametrize("ending", [None, RuntimeError, KeyboardInterrupt])
def test_the_thread_ends(disk, ending):
    seen = []

    def callback(round, state, metrics):
        seen.extend(loading())
        if ending and round == 3:
            raise ending("now")

    if ending is None:
        train(LINE, disk, callbacks=[callback])
    else:
        with pytest.raises(ending, match="now"):
            train(LINE, disk, callbacks=[callback])
    assert seen and not loading()


def test_the_thread_of_draws_that_nobody_closed_ends(disk):
    draw = disk.draws(KEY, 5)
    draw(1)
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("fedgrad-prefetch")]
    del draw
    thread.join(5)
    assert not thread.is_alive()


def test_draws_in_any_order(disk):
    draw = disk.draws(KEY, 5)
    for round in (3, 4, 4, 1, 2, 30, 3):
        assert np.array_equal(draw(round).index, MEMORY.sample(KEY, 5, round).index)
    draw.close()
    draw.close()
    assert not loading()


def test_errors_of_the_thread_reach_the_user(tmp_path):
    clients = fg.store(tmp_path / "clients", POINTS)
    file = tmp_path / "clients" / "leaf0.bin"

    def cut(round, state, metrics):
        if round == 2:
            file.write_bytes(file.read_bytes()[:50])

    with pytest.raises(
        fg.StoreError, match=r"test_stored.py:\d+: .*leaf0\.bin: .*client \d+ cannot.*cut off"
    ):
        train(LINE, clients, 60, callbacks=[cut])
    file.unlink()
    with pytest.raises(fg.StoreError, match=r"leaf0\.bin: No such file"):
        train(LINE, clients)
    assert not loading()


# --- what is written ------------------------------------------------------------------------------


def test_examples_keep_structure_and_dtypes(tmp_path):
    random = np.random.default_rng(0)

    def client(n):
        return {
            "image": random.integers(0, 256, (n, 4, 4)).astype(np.uint8),
            "more": (
                random.integers(-9, 9, (n, 5)).astype(np.int16),
                [random.random(n) < 0.5, None],
            ),
            "half": random.normal(size=n).astype(ml_dtypes.bfloat16),
            "wide": random.normal(size=(n, 2)),
            "token": random.integers(0, 9, (n, 0)).astype(np.int32),
        }

    clients = [client(n) for n in (3, 1, 5)]
    found, wanted = fg.store(tmp_path / "some" / "where", clients), fg.population(clients)
    for i, one in enumerate(clients):
        here, there = found.select([i]), wanted.select([i])
        assert jax.tree.structure(here.store) == jax.tree.structure(there.store)
        for a, b, c in zip(*map(jax.tree.leaves, (here.store, there.store, one)), strict=True):
            assert a.dtype == b.dtype == c.dtype
            start = int(there.offset[0])
            assert np.array_equal(a[: len(c)], b[start : start + len(c)])
            assert np.array_equal(a[len(c) :], np.broadcast_to(c[:1], a[len(c) :].shape))
    image = np.memmap(tmp_path / "some/where/leaf1.bin", np.uint8).reshape(9, 4, 4)
    assert np.array_equal(image, np.concatenate([c["image"] for c in clients]))
    alone = fg.store(tmp_path / "alone", [np.arange(3), np.arange(2)])
    assert alone.select([1]).store.tolist()[:2] == [0, 1]


def test_a_store_knows_the_digest_of_its_examples(tmp_path, monkeypatch):
    path, header = tmp_path / "clients", tmp_path / "clients/store.json"
    known = fg.store(path, POINTS).digest
    assert known == MEMORY.digest == json.loads(header.read_text())["digest"]
    monkeypatch.setattr(folder.Folder, "read", lambda *_: pytest.fail("it reads its files"))
    assert fg.stored(path).digest == known


def test_a_store_without_a_digest_is_read_for_it_once(tmp_path, monkeypatch):
    """As an older version wrote it, whose stores open as before."""
    path = tmp_path / "clients"
    fg.store(path, POINTS)
    changed(digest=None)(path)
    monkeypatch.setattr(on_disk, "PORTION", 500)  # bytes: several portions
    read, reads = folder.Folder.read, []
    monkeypatch.setattr(folder.Folder, "read", lambda *a: reads.append(a) or read(*a))
    clients = fg.stored(path)
    assert clients.digest == clients.digest == MEMORY.digest
    assert len(reads) > 3 and sum(len(index) for _, index, _ in reads) == len(POINTS)
    monkeypatch.setattr(on_disk, "EVERYONE", 10)
    with pytest.warns(RuntimeWarning, match=r"GiB of .*clients are read.*no digest.*rsync -a"):
        assert fg.stored(path).digest == MEMORY.digest


def test_a_store_that_was_changed_has_another_digest(tmp_path):
    """Though its header says what it was."""
    path = tmp_path / "clients"
    known = fg.store(path, POINTS).digest
    labels = np.memmap(path / "leaf1.bin", np.float32, "r+")
    labels[len(labels) // 2] += 1
    labels.flush()
    later = (path / "store.json").stat().st_mtime_ns + 1
    os.utime(path / "leaf1.bin", ns=(later, later))  # clocks of file systems are coarse
    assert fg.stored(path).digest != known
    shutil.copytree(path, tmp_path / "copy")  # with its times
    assert fg.stored(tmp_path / "copy").digest == fg.stored(path).digest


def test_names_and_what_it_is_about(tmp_path, disk):
    with Writer(tmp_path / "named", about={"vocabulary": ["a", "b"]}) as writer:
        for name in ("Anna", "B\nb", "Ö"):
            writer.add({"x": np.ones(2)}, name=name)
    clients = fg.stored(str(tmp_path / "named"))
    assert clients.names == ["Anna", "B\nb", "Ö"]
    assert clients.about == {"vocabulary": ["a", "b"]}
    assert disk.names is None and disk.about == {}
    assert "40 clients" in repr(disk) and str(disk.folder.path) in repr(disk)


WRONG = {
    "no clients": ([], "No clients were added"),
    "no examples": ([{"x": np.ones((0, 2))}], "Client 0 has no examples"),
    "another dtype": ([{"x": np.ones(2)}, {"x": np.ones(2, int)}], r"client 1 are int64.*float64"),
    "another shape": ([{"x": np.ones((2, 3))}, {"x": np.ones((2, 4))}], r"client 1 have shape"),
    "another tree": ([{"x": np.ones(2)}, {"y": np.ones(2)}], "Client 1 has another structure"),
    "words": ([{"x": np.array(["a", "b"])}], r"\['x'\] are <U1.*encode"),
    "another container": ([mean_square], "shapes|no arrays|arrays"),
    "keys": ([{3: np.ones(2)}], "dicts .with names as keys"),
    "nothing": ([{}], "no arrays"),
}


@pytest.mark.parametrize("case", WRONG)
def test_clients_that_are_refused(case, tmp_path):
    clients, message = WRONG[case]
    with pytest.raises(fg.FederatedError, match=message):
        fg.store(tmp_path / "clients", clients)
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_nothing(tmp_path):
    def clients():
        yield {"x": np.ones(3)}
        assert not (tmp_path / "clients").exists()
        raise OSError("the network is down")

    with pytest.raises(OSError, match="network"):
        fg.store(tmp_path / "clients", clients())
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
import numpy as np
from fedgrad.clients.stored import Writer
with Writer(sys.argv[1]) as writer:
    for i in range(1000):
        writer.add({"x": np.ones((1000, 10))})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_opens(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "clients")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with pytest.raises(fg.StoreError, match="does not exist"):
        fg.stored(tmp_path / "clients")
    (left,) = tmp_path.iterdir()
    with pytest.raises(fg.StoreError, match="interrupted: delete it"):
        fg.stored(left)
    assert len(fg.store(tmp_path / "clients", POINTS)) == len(POINTS)  # it may be tried again


def test_a_store_is_written_once(tmp_path):
    (tmp_path / "empty").mkdir()
    fg.store(tmp_path / "empty", POINTS)
    for taken in (tmp_path / "empty", tmp_path / "empty" / "store.json"):
        with pytest.raises(fg.StoreError, match=r"exists already.*choose another path"):
            fg.store(taken, POINTS)
    assert len(fg.stored(tmp_path / "empty")) == len(POINTS)


# --- what does not open ---------------------------------------------------------------------------


def changed(**more):
    def change(folder):
        header = json.loads((folder / "store.json").read_text())
        (folder / "store.json").write_text(json.dumps(header | more))

    return change


def damaged(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def nobody(folder):
    for file in folder.glob("*.bin"):
        file.write_bytes(b"")
    changed(clients=0, examples=0, counts_crc32=0)(folder)


BROKEN = {
    "no header": (lambda folder: (folder / "store.json").unlink(), r"no store.*has no store\.json"),
    "no JSON": (damaged("store.json", lambda x: x[:20]), r"broken: store\.json cannot be read"),
    "another's": (changed(format="other"), r"no store of clients.*somebody else's"),
    "newer": (changed(version=2), "has version 2 of the format.*reads version 1"),
    "no leaves": (changed(leaves=None), r"broken: store\.json is damaged"),
    "odd dtype": (
        changed(leaves=[{"name": "", "file": "leaf0.bin", "dtype": "real", "shape": []}]),
        r"broken: store\.json is damaged",
    ),
    "another byte order": (
        changed(leaves=[{"name": "", "file": "leaf0.bin", "dtype": ">f4", "shape": []}]),
        r"broken: store\.json is damaged.*>f4",
    ),
    "objects": (
        changed(leaves=[{"name": "", "file": "leaf0.bin", "dtype": "object", "shape": []}]),
        r"broken: store\.json is damaged.*object",
    ),
    "odd shape": (
        changed(leaves=[{"name": "", "file": "leaf0.bin", "dtype": "int32", "shape": [1.5]}]),
        r"broken: store\.json is damaged",
    ),
    "odd digest": (changed(digest="x"), r"broken: store\.json is damaged"),
    "no digest": (changed(digest=7), r"broken: store\.json is damaged"),
    "odd tree": (changed(tree="x"), r"broken: store\.json is damaged"),
    "another tree": (changed(tree={"dict": {"x": 0, "y": 0}}), r"damaged.*tree has other leaves"),
    "no end": (changed(clients=float("inf")), r"broken: store\.json is damaged"),
    "nobody": (nobody, r"broken: counts\.bin is damaged"),
    "no leaf": (lambda folder: (folder / "leaf1.bin").unlink(), r"leaf1\.bin: No such file"),
    "short": (damaged("leaf1.bin", lambda x: x[:-1]), r"leaf1\.bin has [\d,]+ bytes and not"),
    "long": (damaged("leaf0.bin", lambda x: x + b" "), r"leaf0\.bin has [\d,]+ bytes and not"),
    "counts": (damaged("counts.bin", lambda x: x[::-1]), r"broken: counts\.bin is damaged"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("")), "is a file and no folder"),
    "nothing": (shutil.rmtree, "does not exist.*fg.store"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_open(case, tmp_path):
    change, message = BROKEN[case]
    path = tmp_path / "clients"
    fg.store(path, POINTS[:3])
    change(path)
    with pytest.raises(fg.StoreError, match=message) as error:
        fg.stored(path)
    assert str(path) in str(error.value) and __file__ in str(error.value)


def test_another_store_in_the_same_place(tmp_path):
    path = tmp_path / "clients"
    old = fg.store(path, POINTS)
    shutil.rmtree(path)
    fg.store(path, POINTS[::-1])  # as many bytes
    with pytest.raises(fg.StoreError, match=r"leaf0\.bin: it was written to since.*Open it again"):
        old.select([0])


def test_names_that_are_cut_off(tmp_path):
    with Writer(tmp_path / "named") as writer:
        for name in ("Anna", "Bert"):
            writer.add({"x": np.ones(2)}, name=name)
    names = tmp_path / "named" / "names.txt"
    for content, message in ((b'"Anna"\n', "has 1 names, not 2"), (b'"An', "cannot be read")):
        names.write_bytes(content)
        with pytest.raises(fg.StoreError, match=rf"broken: names\.txt {message}"):
            print(fg.stored(tmp_path / "named").names)


FULL = """
import resource, signal, sys
import numpy as np
import fedgrad as fg
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    fg.store(sys.argv[1], ({"x": np.ones(20_000)} for _ in range(50)))
except fg.StoreError as error:
    sys.exit(str(error))
"""


def test_a_full_disk_is_said_and_nothing_stays(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path / "clients")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "clients cannot be written: File too large." in done.stderr
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(fg.StoreError, match="cannot be written: Not a directory"):
        fg.store(tmp_path / "file" / "clients", POINTS)
    with pytest.raises(fg.CohortError, match=r"a list or a generator with one pytree.*got int"):
        fg.store(tmp_path / "clients", 5)


def test_what_a_population_on_disk_cannot_do(disk):
    with pytest.raises(fg.CohortError, match=r"on disk is sampled outside of jit"):
        jax.jit(lambda key: disk.sample(key, 5).count)(KEY)
    with pytest.raises(fg.CohortError, match="There are 40 clients"):
        disk.select([40])
    for path in (disk.folder.path, str(disk.folder.path)):
        with pytest.raises(fg.CohortError, match=r"fg\.stored\('.*'\) opens a folder of them"):
            fg.population(path)


# --- numbers that do not fit 32 bits ------------------------------------------------------------

LARGE = [{"id": np.array([0, i]), "x": np.zeros(2)} for i in (3, 2**33 + 5, 4)]
REFUSED = r"test_stored.py:\d+: .*client 1.*id.*8589934597 is int64, and becomes 5 as int32.*x64"


@pytest.mark.parametrize(
    "read",
    {
        "some": lambda clients: clients.select([0]),
        "all": lambda clients: clients.everyone,
        "a round's": lambda clients: clients.sample(KEY, 1),
        "draws": lambda clients: clients.draws(KEY, 1)(1),
        "portions": lambda clients: next(clients.portions()),
        "a training": lambda clients: train(LINE, clients, rounds=1, cohort_size=1),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_number_of_any_client_that_does_not_fit_is_refused(read, tmp_path):
    """Before anybody trains, whoever takes part first."""
    clients = fg.store(tmp_path / "clients", LARGE)
    with jax.enable_x64(False), pytest.raises(fg.StoreError, match=REFUSED):
        read[1](clients)


def test_with_x64_a_store_keeps_large_numbers(tmp_path):
    clients = fg.store(tmp_path / "clients", LARGE)
    assert clients.everyone.store["id"][3] == 2**33 + 5
    with jax.enable_x64(False):
        assert len(fg.stored(tmp_path / "clients")) == 3  # it opens; counts and names can be read


def test_an_older_store_is_looked_at_as_it_is_read(tmp_path):
    """Its header does not say how large its numbers are."""
    fg.store(tmp_path / "clients", LARGE)
    header = json.loads((tmp_path / "clients" / "store.json").read_text())
    for leaf in header["leaves"]:
        del leaf["ends"]
    (tmp_path / "clients" / "store.json").write_text(json.dumps(header))
    clients = fg.stored(tmp_path / "clients")
    with jax.enable_x64(False):
        np.testing.assert_array_equal(clients.select([0, 2]).store["id"][:4], [0, 3, 0, 4])
        with pytest.raises(fg.StoreError, match=r"id.*8589934597 is int64"):
            clients.select([0, 1])


def test_a_store_knows_its_least_and_its_largest_numbers(tmp_path):
    numbers = [np.array([2.0, np.nan, np.inf]), np.array([-1e300, 7.0]), np.array([9.0])]
    header = fg.store(tmp_path / "clients", numbers).folder.leaves[0]
    assert header.ends == ((-1e300, 1), (9.0, 2))
    narrow = fg.store(tmp_path / "narrow", [np.ones(2, np.float32)]).folder.leaves[0]
    assert narrow.ends == ()


def test_a_client_of_more_examples_than_32_bits_does_not_open(tmp_path):
    """Of a store that somebody else has written: the file has holes and takes no space."""
    fg.store(tmp_path / "clients", [np.zeros(1, np.int8)])
    path, count = tmp_path / "clients", 2**31
    counts = np.array([count], "<i8").tobytes()
    (path / "counts.bin").write_bytes(counts)
    with open(path / "leaf0.bin", "r+b") as file:
        file.truncate(count)
    header = json.loads((path / "store.json").read_text())
    header |= {"examples": count, "counts_crc32": zlib.crc32(counts)}
    (path / "store.json").write_text(json.dumps(header))
    with pytest.raises(fg.StoreError, match=r"more than 2,147,483,647 examples"):
        fg.stored(path)
