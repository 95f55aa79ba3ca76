"""Checkpoints: nothing is lost, whatever happens, and a run goes on as if nothing had."""

import errno
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedgrad as fg
from fedgrad.federation.protocol.in_process import InProcess
from fedgrad.training import checkpoint as checkpoints
from fedgrad.training import files, lock
from fedgrad.training.checkpoint import Checkpoint
from fedgrad.training.config import describe, leaves
from fedgrad.training.files import RunFolderError
from fedgrad.training.log import read_log
from line import FIRST, line, mean_square, points
from where import TESTS

POINTS = points()
CLIENTS = fg.population(POINTS)
LINE = line()
CURRENT, PREVIOUS = "checkpoint.npz", "checkpoint.previous.npz"


def train(algorithm=LINE, clients=CLIENTS, rounds=9, **more):
    settings = {"params": FIRST, "cohort_size": 5, "key": jax.random.key(3), "progress": False}
    settings["evaluate"] = fg.Evaluation(lambda p: {"w": p["w"][0]}, every=4)
    return fg.fit(algorithm, clients, rounds=rounds, **(settings | more))


def bits(leaf):
    """What must be the same for two leaves to be the same, bit by bit."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    return leaf.dtype.name, leaf.shape, leaf.weak_type, np.asarray(leaf).tobytes()


def everything(result):
    """All of a result but how long it took."""
    history = result.history
    return (
        [bits(leaf) for leaf in jax.tree.leaves(result.state)],
        {
            name: (values.dtype.name, values.tobytes(), history.rounds(name).tolist())
            for name, values in history.items()
            if name != "seconds"
        },
    )


# What a file holds

LEAVES = {
    "float32": jnp.array([1.5, np.nan, -0.0, np.inf], jnp.float32),
    "float64": jnp.array([1 / 3], jnp.float64),
    "bfloat16": jnp.array([[1.5], [3e38]], jnp.bfloat16),
    "float8": jnp.array([0.5, 2], jnp.float8_e4m3fn),
    "int4": jnp.array([-8, 7], jnp.int4),
    "int8": jnp.array([-128, 127], jnp.int8),
    "uint32": jnp.array([2**32 - 1], jnp.uint32),
    "bool": jnp.array([True, False]),
    "complex64": jnp.array([1 + 2j], jnp.complex64),
    "scalar": jnp.int32(-7),
    "empty": jnp.zeros((0, 3)),
    "weak float": jnp.asarray(0.1),
    "weak int": jnp.asarray(3),
    "weak vector": jnp.broadcast_to(jnp.asarray(2.0), (3,)),
    "key": jax.random.key(1),
    "keys": jax.random.split(jax.random.key(1), 3),
    "rbg key": jax.random.key(1, impl="rbg"),
    "old key": jax.random.PRNGKey(1),
}


@pytest.mark.parametrize("name", LEAVES)
def test_every_kind_of_leaf_survives(name, tmp_path):
    state = {"a": LEAVES[name], "b": (jnp.arange(3.0), LEAVES[name])}
    config = {"state": leaves(state)}
    history = fg.History({"loss": ([1, 2], np.array([0.1, np.nan], np.float32)), "n": ([2], [7])})
    checkpoints.save(tmp_path, Checkpoint(2, state, history, config))
    found = checkpoints.load(tmp_path, state, config)
    assert found.round == 2
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    assert [*map(bits, jax.tree.leaves(found.state))] == [*map(bits, jax.tree.leaves(state))]
    assert found.history["loss"].tobytes() == history["loss"].tobytes()
    assert found.history.rounds("n").tolist() == [2]


def test_numpy_opens_it_and_there_is_no_code_in_it(tmp_path):
    result = train(out=tmp_path)
    with np.load(tmp_path / CURRENT, allow_pickle=False) as file:
        description = json.loads(file["checkpoint.json"])
        names = [leaf["name"] for leaf in description["state"]]
        stored = file[f"state/{names.index('params[' + repr('w') + ']')}"]
        assert np.array_equal(stored, result.params["w"])
        assert description["round"] == 9
    with zipfile.ZipFile(tmp_path / CURRENT) as archive:
        assert {Path(name).suffix for name in archive.namelist()} == {".json", ".npy"}


def test_a_state_that_changes_its_structure_cannot_be_kept(tmp_path):
    state, config = {"a": jnp.ones(2)}, {"state": {"b": "float32[2]"}}
    with pytest.raises(RunFolderError, match=r"other leaves .*'a'.*'b'"):
        checkpoints.save(tmp_path, Checkpoint(1, state, fg.History(), config))


# A run that goes on


@pytest.mark.parametrize("at", [1, 3, 4, 8])
def test_a_run_that_failed_goes_on_bit_by_bit(at, tmp_path):
    def fail(round, state, metrics):
        if round == at:
            raise ZeroDivisionError

    often = fg.run_folder(tmp_path, every=3)
    with pytest.raises(ZeroDivisionError) as caught:
        train(out=often, callbacks=[fail])
    assert f"Round {at} is saved" in caught.value.__notes__[0]
    resumed = train(out=often)
    assert everything(resumed) == everything(train())
    log = read_log(tmp_path / "history.jsonl")
    assert log["loss"].tolist() == resumed.history["loss"].tolist()
    assert log.rounds("eval.w").tolist() == [0, 4, 8, 9]


def test_a_self_tuned_run_goes_on_bit_by_bit(tmp_path):
    plain = fg.fed_adam(mean_square, fg.local_training(batch_size=4))
    tuned = fg.self_tuning(plain, ["server.learning_rate", "client.learning_rate"])
    train(tuned, rounds=4, out=tmp_path)
    resumed = train(tuned, rounds=8, out=tmp_path)
    straight = train(tuned, rounds=8)
    assert everything(resumed) == everything(straight)
    assert resumed.hyper == straight.hyper


def test_more_rounds_of_a_finished_run(tmp_path):
    train(rounds=4, out=tmp_path)
    again = train(rounds=4, out=tmp_path, callbacks=[lambda *_: pytest.fail("nothing is left")])
    assert everything(again) == everything(train(rounds=4))
    assert everything(train(rounds=9, out=tmp_path)) == everything(train(rounds=9))
    with pytest.raises(RunFolderError, match="has 9 rounds already"):
        train(rounds=5, out=tmp_path)
    assert train(rounds=5, out=fg.run_folder(tmp_path, resume=False)).rounds == 5


def test_what_a_killed_run_logged_after_its_checkpoint_is_forgotten(tmp_path):
    train(rounds=4, out=tmp_path)
    with (tmp_path / "history.jsonl").open("a") as log:
        log.write('{"round": 5, "loss": 123.0}\n{"round": 6, "lo')
    resumed = train(out=tmp_path)
    rows = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(row)["loss"] for row in rows[1:]] == resumed.history["loss"].tolist()


ANOTHER = {
    "hyper": ({"algorithm": LINE.starting({"rate": 0.2})}, "hyper.rate: 0.1 .* 0.2 now"),
    "cohort size": ({"cohort_size": 6}, "cohort size: 5 in the checkpoint, 6 now"),
    "key": ({"key": jax.random.key(4)}, "key= is another one"),
    "first model": ({"params": {"w": np.ones(3, np.float32)}}, "begins with other numbers"),
    "dtype": ({"params": {"w": np.zeros(3)}}, r"params\['w'\]: float32\[3\] .* float64\[3\]"),
    "shape": ({"params": {"v": FIRST["w"], **FIRST}}, r"params\['v'\]: nothing .* float32"),
    "batch size": ({"algorithm": line(batch_size=3)}, "a round computes something else"),
    "algorithm": (
        {"algorithm": fg.fed_avg(mean_square)},
        "name: line_round in the checkpoint, FedAvg now",
    ),
    "fewer clients": (
        {"clients": fg.population(POINTS[:7])},
        "number of clients: 12 in the checkpoint, 7 now",
    ),
    "other data": ({"clients": fg.population(points(seed=1))}, "examples of clients: 59 .* 77 now"),
    "config": ({"task": "other"}, "config.task: mine .* other now"),
}


@pytest.mark.parametrize("name", ANOTHER)
@pytest.mark.promotes("dtype")
def test_the_checkpoint_of_another_run_is_refused(name, tmp_path):
    train(rounds=2, out=fg.run_folder(tmp_path, config={"task": "mine"}))
    before = (tmp_path / CURRENT).read_bytes()
    settings, message = ANOTHER[name]
    out = fg.run_folder(tmp_path, config={"task": settings.get("task", "mine")})
    with pytest.raises(RunFolderError, match=message) as caught:
        train(rounds=4, out=out, **{k: v for k, v in settings.items() if k != "task"})
    assert "resume=False" in str(caught.value) and "test_checkpoint.py" in str(caught.value)
    assert (tmp_path / CURRENT).read_bytes() == before


# The data: many rows, so that whoever looks at a few of them misses what differs.

MANY = [
    {"x": np.tile(np.eye(3, dtype=np.float32), (200, 1)), "y": np.full(600, i, np.float32)}
    for i in range(6)
]


def one_row(clients, client, row):
    """The same but for one label."""
    changed = [dict(one) for one in clients]
    changed[client] = {**changed[client], "y": changed[client]["y"].copy()}
    changed[client]["y"][row] += 1
    return changed


RELABELED = {
    "two thirds of all labels": [
        {**one, "y": np.where(np.arange(600) % 3 == 0, one["y"], 7).astype(np.float32)}
        for one in MANY
    ],
    "one label": one_row(MANY, 3, 401),
    "the last label": one_row(MANY, 5, 599),
    "clients in another order": MANY[::-1],
}
PLACES = {
    "in memory": lambda clients, folder: fg.population(clients),
    "on disk": lambda clients, folder: fg.store(folder, clients),
    "on a mesh": lambda clients, folder: fg.executors.mesh().population(clients),
}
FED_AVG = fg.fed_avg(mean_square)
OTHER = re.escape(
    "\n  clients have other examples than those of the checkpoint.\nTo go on with that run, call "
    'fg.fit as it was called then. If they are meant to be others, give resume="other data" to '
    "fg.run_folder. For a new one"
)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_on_other_data_is_another_run(place, tmp_path):
    first = PLACES[place](MANY, tmp_path / "first")
    train(FED_AVG, first, rounds=1, out=tmp_path / "run")
    for number, (name, clients) in enumerate(RELABELED.items()):
        other = PLACES[place](clients, tmp_path / str(number))
        with pytest.raises(RunFolderError, match=OTHER):
            train(FED_AVG, other, rounds=2, out=tmp_path / "run")
            pytest.fail(f"{name}: it trains")
    meant = fg.run_folder(tmp_path / "run", resume="other data")
    assert train(FED_AVG, other, rounds=2, out=meant).rounds == 2
    assert train(FED_AVG, other, rounds=3, out=tmp_path / "run").rounds == 3  # now it is its own
    with pytest.raises(RunFolderError, match=OTHER):
        train(FED_AVG, first, rounds=4, out=tmp_path / "run")


def test_other_data_excuses_nothing_else(tmp_path):
    clients, other = fg.population(MANY), fg.population(RELABELED["one label"])
    train(FED_AVG, clients, rounds=1, out=tmp_path)
    meant = fg.run_folder(tmp_path, resume="other data")
    with pytest.raises(RunFolderError, match=r"hyper.client.learning_rate: 0.1 .*0.2 now") as told:
        train(fg.fed_avg(mean_square, 0.2), other, rounds=2, out=meant)
    assert "other data" not in str(told.value)  # it would not help
    with pytest.raises(RunFolderError, match="a round computes something else"):
        train(fg.fed_avg(lambda p, b: 2 * mean_square(p, b)), clients, rounds=2, out=meant)
    scaffold = fg.scaffold(mean_square)  # whose clients keep something
    train(scaffold, clients, rounds=1, out=tmp_path / "scaffold")
    with pytest.raises(
        RunFolderError, match=r"clients.control\['w'\]: float32\[6,3\] .*\[5,3\] now"
    ):
        out = fg.run_folder(tmp_path / "scaffold", resume="other data")
        train(scaffold, fg.population(MANY[:5]), rounds=2, out=out)


def test_more_clients_are_other_data_too(tmp_path):
    train(FED_AVG, fg.population(MANY), rounds=1, out=tmp_path)
    more = fg.population([*MANY, *MANY[:2]])
    with pytest.raises(RunFolderError, match=r"number of clients: 6 .*8 now.*\n.*\n.*other data"):
        train(FED_AVG, more, rounds=2, out=tmp_path)
    meant = fg.run_folder(tmp_path, resume="other data")
    assert train(FED_AVG, more, rounds=2, out=meant).rounds == 2


def test_other_clients_of_hypergradients_are_other_data(tmp_path):
    def tuned(clients):
        return fg.self_tuning(
            FED_AVG, learn="server.learning_rate", gradient_from=fg.population(clients)
        )

    clients = fg.population(MANY)
    train(tuned(MANY), clients, rounds=1, out=tmp_path)
    with pytest.raises(RunFolderError, match="\n  clients of gradient_cohort have other examples"):
        train(tuned(RELABELED["one label"]), clients, rounds=2, out=tmp_path)


JUDGED = {
    "other examples": (
        lambda: fg.Evaluation({"loss": mean_square}, fg.population(RELABELED["one label"])),
        "clients of the evaluation 'test' have other examples than those of the checkpoint",
    ),
    "a cohort": (
        lambda: fg.Evaluation({"loss": mean_square}, fg.population(MANY).select([0, 1])),
        "number of clients of the evaluation 'test': 6 in the checkpoint, 2 now",
    ),
    "other clients": (
        lambda: fg.Evaluation({"loss": mean_square}, fg.population(MANY[:5])),
        "number of clients of the evaluation 'test': 6 in the checkpoint, 5 now",
    ),
    "held out": (
        lambda: fg.Evaluation({"loss": mean_square}, fg.population(MANY), held_out=fg.HeldOut()),
        "examples held out of clients of the evaluation 'test': nothing in .*"
        r", HeldOut\(fraction=0.2, seed=0\) now",
    ),
}


def test_a_model_is_judged_by_the_same_data(tmp_path):
    """By which `fg.keep_best` and `fg.early_stop` compare it with models before the resume."""
    clients = fg.population(MANY)
    mean = fg.Evaluation({"loss": mean_square}, fg.population(MANY))
    train(FED_AVG, clients, rounds=1, out=tmp_path, evaluate={"test": mean})
    for make, words in JUDGED.values():
        with pytest.raises(RunFolderError, match=f"\n  {words}.\n.*other data"):
            train(FED_AVG, clients, rounds=2, out=tmp_path, evaluate={"test": make()})
    other = {"test": JUDGED["other examples"][0]()}
    meant = fg.run_folder(tmp_path, resume="other data")
    twice = fg.fed_avg(lambda p, b: 2 * mean_square(p, b))
    with pytest.raises(RunFolderError, match="a round computes something else"):
        train(twice, clients, rounds=2, out=meant, evaluate=other)
    assert train(FED_AVG, clients, rounds=2, out=meant, evaluate=other).rounds == 2
    # Another evaluation has another name; and who evaluates no more may do so.
    both = {"more": JUDGED["a cohort"][0](), **other}
    assert train(FED_AVG, clients, rounds=3, out=tmp_path, evaluate=both).rounds == 3
    assert train(FED_AVG, clients, rounds=4, out=tmp_path, evaluate=None).rounds == 4


def test_what_cannot_be_read_is_not_taken_for_the_same(tmp_path):
    """Of clients on nodes only their number is known."""
    nodes = [fg.executors.flower(InProcess.of(c), platforms=("cpu",)) for c in (MANY, MANY[:5])]
    here, there, fewer = fg.population(MANY), *(one.population() for one in nodes)
    train(FED_AVG.on(nodes[0]), there, rounds=1, out=tmp_path)
    assert train(FED_AVG.on(nodes[0]), there, rounds=2, out=tmp_path).rounds == 2
    with pytest.raises(RunFolderError, match="number of clients: 6 in the checkpoint, 5 now"):
        train(FED_AVG.on(nodes[1]), fewer, rounds=3, out=tmp_path)
    with pytest.raises(
        RunFolderError, match="examples of clients: nothing in the checkpoint, 3600 now"
    ):
        train(FED_AVG, here, rounds=3, out=tmp_path)
    by_us = fg.Evaluation({"loss": mean_square}, here)
    by_nodes = fg.Evaluation({"loss": mean_square}, there).on(nodes[0])
    train(FED_AVG, here, rounds=1, out=tmp_path / "judged", evaluate=by_nodes)
    with pytest.raises(RunFolderError, match="whether clients of the evaluation have the examples"):
        train(FED_AVG, here, rounds=2, out=tmp_path / "judged", evaluate=by_us)


def test_how_a_run_is_resumed_is_one_of_three(tmp_path):
    for wrong in ("other_data", "no", None, 1, "True"):
        with pytest.raises(fg.ArgumentError, match=r"resume=.*True, False or \"other data\""):
            fg.run_folder(tmp_path, resume=wrong)


def without_digests(course, state, settings, describe=describe):
    """What a version wrote that looked at some rows of the data only."""
    found = describe(course, state, settings)
    assert found.pop("evaluations") is not None
    for one in found["populations"].values():
        assert one.pop("digest") and one["data"]
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_without_digests_is_compared_by_its_rows(place, tmp_path, monkeypatch):
    clients = PLACES[place](MANY, tmp_path / "clients")
    with monkeypatch.context() as older:
        older.setattr("fedgrad.training.fit.describe", without_digests)
        train(FED_AVG, clients, rounds=1, out=tmp_path / "run")
    shifted = [{**one, "y": one["y"] + 1} for one in MANY]
    with pytest.raises(RunFolderError, match=OTHER):
        train(FED_AVG, PLACES[place](shifted, tmp_path / "2"), rounds=2, out=tmp_path / "run")
    assert train(FED_AVG, clients, rounds=2, out=tmp_path / "run").rounds == 2
    other = PLACES[place](RELABELED["one label"], tmp_path / "3")
    with pytest.raises(RunFolderError, match=OTHER):  # from now on it is known
        train(FED_AVG, other, rounds=3, out=tmp_path / "run")


def test_what_differs_is_said_in_words(tmp_path):
    """ "batch size 10 in the checkpoint, 20 now", and not that two digests differ."""

    def work(**more):
        return fg.fed_avgm(mean_square, fg.local_training(**more))

    train(work(batch_size=10), rounds=1, out=tmp_path)
    with pytest.raises(RunFolderError) as caught:
        train(work(batch_size=20, epochs=3), rounds=2, out=tmp_path)
    different = str(caught.value).splitlines()[1:-1]
    assert different == [
        "  batch size of clients: 10 in the checkpoint, 20 now.",
        "  epochs of clients: 1 in the checkpoint, 3 now.",
    ]
    with pytest.raises(RunFolderError, match=r"optimizer of the server: sgd .* adaptive, .* now"):
        train(fg.fed_adam(mean_square, fg.local_training(batch_size=10)), out=tmp_path)
    tuned = fg.self_tuning(work(batch_size=10), "server.momentum")
    with pytest.raises(RunFolderError) as caught:
        train(tuned, out=tmp_path)
    assert str(caught.value).splitlines()[1:-1] == [  # and not of what its state is made
        "  learns: nothing in the checkpoint, server.momentum now."
    ]
    for around, words in {
        fg.averaged: "average: nothing in the checkpoint, of late models, power 7 now.",
        fg.self_tuning: "finds: nothing in the checkpoint, its own learning rates now.",
    }.items():
        with pytest.raises(RunFolderError) as caught:
            train(around(work(batch_size=10)), out=tmp_path)
        assert str(caught.value).splitlines()[1:-1] == [f"  {words}"]


# What was asked of self-tuning, another answer, and what is then said.
TUNED_OTHERWISE = {
    "optimizer": (
        optax.adam(0.1),
        "optimizer of self-tuning: .*size=-0.01. in .*size=-0.1. now",
    ),
    "guard": (5.0, "guard of self-tuning: 1000.0 in the checkpoint, 5.0 now"),
    "schedule": ("serial", "schedule of self-tuning: parallel in the checkpoint, serial now"),
    "gradient_from": ("same", "gradient cohort of self-tuning: fresh, batches of 50 in .*, same"),
    "mode": ("forward", "mode of self-tuning: auto in the checkpoint, forward now"),
    "horizon": (math.inf, "horizon of self-tuning: 1, through all in .*, inf, through all now"),
    "learn": (
        {"server.momentum": fg.logit(0, 0.9)},
        r"form of server.momentum: linear\(0.0, 0.999\) in .*, logit\(0, 0.9\) now",
    ),
}


def test_how_it_is_tuned_is_kept_and_what_differs_said(tmp_path):
    algorithm = fg.fed_avgm(mean_square)
    asked = {"learn": "server.momentum", "optimizer": optax.adam(0.01)}
    train(fg.self_tuning(algorithm, **asked), rounds=1, out=tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())["algorithm"]
    assert kept["learns"] == "server.momentum" and kept["tuning"]["guard"] == "1000.0"
    for name, (other, words) in TUNED_OTHERWISE.items():
        with pytest.raises(RunFolderError) as caught:
            train(fg.self_tuning(algorithm, **{**asked, name: other}), rounds=2, out=tmp_path)
        (said,) = str(caught.value).splitlines()[1:-1]  # once, and not of what the state is made
        assert re.match(f"  {words}", said), said


def test_an_optimizer_in_other_words_is_the_same(tmp_path):
    """As older versions wrote it, or as another optax calls what is inside."""
    algorithm = fg.fed_avgm(mean_square, fg.local_training(optax.sgd(0.1)))
    train(algorithm, rounds=1, out=tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["algorithm"]["client"]["optimizer"] == "scale(step_size=-0.1)"
    config["algorithm"]["client"]["optimizer"] = "an optimizer of optax"
    path.write_text(json.dumps(config))
    assert train(algorithm, rounds=2, out=tmp_path).rounds == 2
    other = fg.fed_avgm(mean_square, fg.local_training(optax.sgd(0.2)))
    with pytest.raises(RunFolderError, match=r"optimizer of clients: .*size=-0.2\) now"):
        train(other, rounds=3, out=tmp_path)


def test_another_average_is_another_run(tmp_path):
    algorithm = fg.fed_avgm(mean_square)
    train(fg.averaged(algorithm), rounds=1, out=tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept["algorithm"]["average"] == "of late models, power 7"
    for other, now in (
        (fg.averaged(algorithm, 3), "of late models, power 3"),
        (algorithm, "nothing"),
    ):
        with pytest.raises(RunFolderError) as caught:
            train(other, rounds=2, out=tmp_path)
        assert str(caught.value).splitlines()[1:-1] == [
            f"  average: of late models, power 7 in the checkpoint, {now} now."
        ]


def test_a_fixed_array_that_differs_is_named(tmp_path):
    def scaled(params, batch, fixed):
        return fixed["by"] * mean_square(params, batch) + fixed["and"][0]

    def work(by, more, loss=scaled):
        fixed = {"by": np.float32(by), "and": np.full(2000, more, np.float32)}
        return fg.fed_avg(fg.with_fixed(loss, fixed))

    train(work(1, 1), rounds=1, out=tmp_path)
    with pytest.raises(RunFolderError) as caught:
        train(work(2, 1), rounds=2, out=tmp_path)
    assert str(caught.value).splitlines()[1:-1] == [
        "  the array fixed['by'] of fg.with_fixed is another one than in the checkpoint."
    ]
    with pytest.raises(RunFolderError, match=r"array fixed\['and'\] .*\n  the array fixed\['by'\]"):
        train(work(2, 2), rounds=2, out=tmp_path)
    with pytest.raises(RunFolderError, match="a round computes something else"):
        train(work(1, 1, lambda p, b, fixed: 2 * scaled(p, b, fixed)), rounds=2, out=tmp_path)
    assert train(work(1, 1), rounds=2, out=tmp_path).rounds == 2


def test_a_checkpoint_of_an_older_version_says_less_and_goes_on(tmp_path, monkeypatch):
    def less(course, state, settings, describe=describe):
        found = describe(course, state, settings)
        kept = ("round", "program", "schedules")
        return {**found, "algorithm": {name: found["algorithm"][name] for name in kept}}

    with monkeypatch.context() as older:
        older.setattr("fedgrad.training.fit.describe", less)
        train(fg.fed_avg(mean_square), rounds=1, out=tmp_path)
    assert train(fg.fed_avg(mean_square), rounds=2, out=tmp_path).rounds == 2


@pytest.mark.parametrize("content", ['{"mine": 1}', "[1]", "not JSON", '{"versions": 3}'])
@pytest.mark.parametrize("resume", [True, False])
def test_a_config_of_somebody_else_is_left_alone(content, resume, tmp_path):
    (tmp_path / "config.json").write_text(content)
    never = lambda *_: pytest.fail("it trains")
    with pytest.raises(RunFolderError, match=r"config.json was not written by fedgrad.*Choose"):
        train(out=fg.run_folder(tmp_path, resume=resume), callbacks=[never])
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("config.json", content)]


def test_it_is_told_where_a_run_goes_on(tmp_path, capsys):
    train(rounds=4, out=tmp_path, progress=True)
    assert "resumed" not in capsys.readouterr().err
    train(rounds=9, out=tmp_path, progress=True)
    assert capsys.readouterr().err.startswith("resumed at round 5 of 9\nround 4/9 · compiling\n")
    train(rounds=9, out=tmp_path, progress=True)
    assert capsys.readouterr().err == "all 9 rounds are done already\n"


def decay(start, later=1.0):
    """A schedule, and one that differs from it only late."""
    return lambda round: jnp.where(round < 6000, start / (1 + round), later)


# Two that are equal, and not the same object.
SCHEDULED, SAME = (fg.fed_avg(mean_square, client=decay(0.1)) for _ in range(2))
OTHERWISE = {
    "start": (decay(0.5), "hyper.client.learning_rate: a schedule, 0.1, 0.05, .* 0.5, 0.25, .*now"),
    "late": (decay(0.1, later=2.0), "the schedule of client.learning_rate is another one"),
    "a number": (0.1, "hyper.client.learning_rate: a schedule, 0.1, .* 0.1 now"),
}


@pytest.fixture(scope="module", params=["local", "federated"])
def place(request):
    """Where to train, and whom: one executor for all, so that it compiles once."""
    if request.param == "local":
        return fg.executors.local(), CLIENTS
    nodes = fg.executors.flower(InProcess.of(POINTS), platforms=("cpu",))
    return nodes, nodes.population()


@pytest.mark.parametrize("rate, message", OTHERWISE.values(), ids=OTHERWISE)
def test_another_schedule_is_another_run(rate, message, place, tmp_path):
    """Also where the program of a round cannot be compared, because the data are elsewhere."""
    executor, clients = place

    def run(algorithm, rounds):
        return train(algorithm.on(executor), clients, rounds, out=tmp_path)

    run(SCHEDULED, 1)
    assert run(SAME, 2).rounds == 2
    with pytest.raises(RunFolderError, match=message) as caught:
        run(fg.fed_avg(mean_square, client=rate), 3)
    assert len(str(caught.value).splitlines()) == 3  # one thing differs, and it is said once


def test_another_version_may_go_on_with_a_run(tmp_path, monkeypatch):
    train(rounds=2, out=tmp_path)
    monkeypatch.setattr("fedgrad.training.config.version", lambda name: "99")
    monkeypatch.setattr("fedgrad.training.config._program", lambda *_: "written differently")
    assert train(rounds=4, out=tmp_path).rounds == 4


def test_the_digest_of_a_program_is_the_same_in_every_process(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from line import *\n"
        "a = fg.self_tuning(fg.fed_prox(mean_square), ['client', 'proximal_weight'])\n"
        "fg.fit(a, fg.population(points()), params=FIRST, rounds=0, cohort_size=5,\n"
        "    key=jax.random.key(0), out=sys.argv[2], progress=False)\n"
    )
    found = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        run([sys.executable, "-c", code, str(TESTS), str(out)], seed)
        found.append(json.loads((out / "config.json").read_text()))
    assert found[0] == found[1] and found[0]["algorithm"]["program"]


def run(command, seed="0"):
    environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True)


# Damage


@pytest.fixture
def kept(tmp_path):
    """A folder with a checkpoint of round 8 and the one of round 4 before it."""
    train(rounds=4, out=tmp_path)
    train(rounds=8, out=tmp_path)
    return tmp_path


def test_every_damage_is_noticed(kept):
    content = (kept / CURRENT).read_bytes()
    places = [*range(0, len(content), 97), *range(len(content) - 100, len(content), 7)]
    damaged = [content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :] for i in places]
    damaged += [content[:n] for n in (0, 1, 63, 64, 65, len(content) // 2, len(content) - 1)]
    damaged += [content + b"\0"]
    template = LINE.init(FIRST)
    config = json.loads((kept / "config.json").read_text())
    assert checkpoints.load(kept, template, config).round == 8
    for bad in damaged:
        (kept / CURRENT).write_bytes(bad)
        with pytest.raises(RunFolderError, match="is damaged"):
            checkpoints.load(kept, template, config)


def test_the_older_checkpoint_is_there_when_the_last_one_is_damaged(kept):
    content = (kept / CURRENT).read_bytes()
    (kept / CURRENT).write_bytes(content[:-1000])
    with pytest.raises(RunFolderError, match=f"Delete it to go on .* {PREVIOUS}, of round 4"):
        train(out=kept)
    (kept / CURRENT).unlink()
    seen = []
    resumed = train(out=kept, callbacks=[lambda round, *_: seen.append(round)])
    assert seen[0] == 5 and everything(resumed) == everything(train())


def test_both_are_damaged(kept):
    for name in (CURRENT, PREVIOUS):
        (kept / name).write_bytes(b"PK")
    with pytest.raises(RunFolderError, match=f"So is {re.escape(PREVIOUS)}. Give resume=False"):
        train(out=kept)
    assert train(out=fg.run_folder(kept, resume=False)).rounds == 9


# A full disk


class Full:
    """A file system without room: the n-th operation of a kind fails."""

    def __init__(self, monkeypatch, kind, after=0):
        self.left, original = after, getattr(os, kind)

        def fails(*args, **more):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **more)

        monkeypatch.setattr(files.os, kind, fails)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("kind", ["fsync", "replace"])
def test_a_full_disk_loses_no_checkpoint(kind, after, kept, monkeypatch):
    template, config = LINE.init(FIRST), json.loads((kept / "config.json").read_text())
    nine = train()
    later = Checkpoint(9, nine.state, nine.history, config)
    with monkeypatch.context() as patch:
        Full(patch, kind, after)
        with pytest.raises(RunFolderError, match=r"No space left on device.*untouched") as caught:
            checkpoints.save(kept, later)
    assert isinstance(caught.value.__cause__, OSError)
    assert checkpoints.load(kept, template, config).round == (
        9 if (kind, after) == ("fsync", 1) else 8
    )
    assert not list(kept.glob("*.tmp"))
    assert everything(train(out=kept)) == everything(train())


def test_a_full_disk_while_training(kept):
    """The system itself refuses to write the whole file."""
    half = (kept / "checkpoint.npz").stat().st_size // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(round, state, metrics):
        if round == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (half, hard))

    try:
        with pytest.raises(RunFolderError, match=r"Cannot write .*checkpoint.npz.*File too large"):
            train(rounds=12, out=fg.run_folder(kept, every=1), callbacks=[fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    seen = []
    resumed = train(rounds=12, out=kept, callbacks=[lambda round, *_: seen.append(round)])
    assert seen == [10, 11, 12] and everything(resumed) == everything(train(rounds=12))


def test_a_log_that_cannot_be_written(kept):
    """/dev/full takes no byte; the checkpoint is in another file."""
    with pytest.raises(RunFolderError, match=r"Cannot write .*history.jsonl.*No space left"):
        _train_with_a_full_log(kept)
    assert everything(train(out=kept)) == everything(train())


def _train_with_a_full_log(folder):
    from fedgrad.training.log import Log

    begin = Log.__init__

    def full(self, path, history):
        begin(self, path, history)
        self.file.close()
        self.file = open("/dev/full", "a")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Log, "__init__", full)
        train(out=folder)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Cannot make the folder"):
        train(out=tmp_path / "file" / "run")


# Interrupts


def test_ctrl_c_saves_and_a_second_one_does_not_prevent_it(tmp_path, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGINT)
    pressed = []
    fsync = os.fsync

    def press(round, state, metrics):
        if round == 5:
            pressed.append(round)
            signal.raise_signal(signal.SIGINT)

    def impatient(descriptor):
        if len(pressed) == 1:  # while the checkpoint is written
            pressed.append("again")
            signal.raise_signal(signal.SIGINT)
        return fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", impatient)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(out=tmp_path, callbacks=[press])
    assert pressed == [5, "again"]
    assert "Round 5 is saved" in caught.value.__notes__[0]
    assert "Ctrl-C again to give it up" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler
    assert everything(train(out=tmp_path)) == everything(train())


def test_ctrl_c_a_third_time_is_obeyed(tmp_path, monkeypatch):
    fsync, pressed = os.fsync, []

    def press(round, state, metrics):
        if round == 5:
            pressed.append(round)
            signal.raise_signal(signal.SIGINT)

    def impatient(descriptor):
        if len(pressed) == 1:
            pressed.append("again")
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(out=fg.run_folder(tmp_path, every=2), callbacks=[press])
    monkeypatch.undo()
    seen = []
    train(out=tmp_path, callbacks=[lambda round, *_: seen.append(round)])
    assert seen[0] == 5  # from the checkpoint of round 4


def test_sigterm_saves_and_ends_the_process(tmp_path, capsys):
    def terminate(round, state, metrics):
        if round == 5:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        train(out=tmp_path, callbacks=[terminate])
    assert caught.value.code == 128 + signal.SIGTERM
    assert "Round 5 is saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert json.loads((tmp_path / "status.json").read_text())["stopped"] == "interrupted"
    assert everything(train(out=tmp_path)) == everything(train())


def test_a_program_with_its_own_idea_of_sigterm_keeps_it(monkeypatch):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("own"))
    try:
        terminate = lambda round, *_: round == 2 and signal.raise_signal(signal.SIGTERM)
        assert train(callbacks=[terminate]).rounds == 9 and seen == ["own"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_that_a_callback_handles_is_over():
    def handled(round, state, metrics):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert train(callbacks=[handled]).rounds == 9


def test_it_runs_outside_of_the_main_thread(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(train, out=tmp_path).result()
    assert everything(result) == everything(train())


# Killed


def start(folder, rounds, devices):
    command = [sys.executable, str(TESTS / "line.py"), str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*command, str(rounds), str(devices)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_round(process, folder, round):
    """Until a checkpoint of that round or a later one is there."""
    while process.poll() is None:
        try:
            with np.load(folder / CURRENT) as file:
                if json.loads(file["checkpoint.json"])["round"] >= round:
                    return
        except (OSError, zipfile.BadZipFile):
            pass
        time.sleep(0.005)
    pytest.fail(f"it ended before round {round}: {process.communicate()}")


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def contents(folder):
    """All arrays of the last checkpoint by name, without how long rounds took."""
    with np.load(folder / CURRENT) as file:
        description = json.loads(file["checkpoint.json"])
        timed = [i for i, c in enumerate(description["history"]) if c["name"] == "seconds"]
        names = [n for n in file.files if n not in {f"history/{i}/values" for i in timed}]
        return {n: file[n] if n == "checkpoint.json" else file[n].tobytes() for n in names}


ENDS = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
}  # the process's exit code


@pytest.mark.parametrize(
    ("devices", "signals"),
    [(1, [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]), (2, [signal.SIGKILL])],
)
def test_a_killed_run_goes_on_bit_by_bit(devices, signals, tmp_path):
    straight = start(tmp_path / "straight", 40, devices)
    for number, after in zip(signals, (9, 18, 27), strict=False):
        victim = start(tmp_path / "killed", 40, devices)
        wait_for_round(victim, tmp_path / "killed", after)
        victim.send_signal(number)
        code, out, err = finish(victim)
        assert code == ENDS[number], err
        assert number != signal.SIGINT or re.search(r"interrupted: Round \d+ is saved", out)
    for process in (start(tmp_path / "killed", 40, devices), straight):
        code, _, err = finish(process)
        assert code == 0, err
    assert contents(tmp_path / "killed") == contents(tmp_path / "straight")
    logs = [read_log(tmp_path / name / "history.jsonl") for name in ("killed", "straight")]
    for name in set(logs[0]) - {"seconds"}:
        assert logs[0][name].tolist() == logs[1][name].tolist()
        assert logs[0].rounds(name).tolist() == logs[1].rounds(name).tolist()


# Two at the same time


def test_a_second_training_in_a_folder_is_refused(tmp_path):
    def again(round, state, metrics):
        for resume in (True, False):
            with pytest.raises(RunFolderError) as caught:
                train(out=fg.run_folder(tmp_path, resume=resume))
            refused.append(str(caught.value))

    refused = []
    found = train(out=fg.run_folder(tmp_path, every=1), callbacks=[again])
    assert everything(found) == everything(train())
    assert len(refused) == 2 * 9 and len(set(refused)) == 1
    assert re.search(
        rf"test_checkpoint.py:\d+: Another training writes to {tmp_path}: process {os.getpid()} "
        rf"\(this one\) on .*, since \d{{4}}-.*\. Wait until it has ended, or choose another out=",
        refused[0],
    )
    assert not list(tmp_path.glob(".*"))  # nothing of it stays


@pytest.mark.promotes("dtype")
def test_a_training_in_another_process_is_named_and_kill_9_leaves_no_lock(tmp_path):
    other = start(tmp_path, 10_000, 1)
    try:
        wait_for_round(other, tmp_path, 3)
        with pytest.raises(RunFolderError, match=rf"writes to {tmp_path}: process {other.pid} on"):
            train(out=tmp_path)
        assert fg.load(tmp_path).rounds >= 3  # whoever reads needs nobody's leave
        assert fg.report(tmp_path).exists()
        assert other.poll() is None
    finally:
        other.kill()
        finish(other)
    again = start(tmp_path, 10_000, 1)  # at once
    try:
        wait_for_round(again, tmp_path, fg.load(tmp_path).rounds + 3)
    finally:
        again.kill()
        finish(again)


ENDED = {
    "an error": (ZeroDivisionError, lambda: 1 / 0),
    "Ctrl-C": (KeyboardInterrupt, lambda: signal.raise_signal(signal.SIGINT)),
    "SIGTERM": (SystemExit, lambda: signal.raise_signal(signal.SIGTERM)),
}


@pytest.mark.parametrize("way", ENDED)
def test_the_folder_is_free_however_training_ended(way, tmp_path):
    """Though a notebook keeps the error with all that it saw."""
    kind, end = ENDED[way]
    with pytest.raises(kind) as caught:
        train(out=tmp_path, callbacks=[lambda round, *_: round == 5 and end()])
    assert everything(train(out=tmp_path)) == everything(train())
    assert caught.value.__traceback__ is not None


def test_the_folder_is_free_after_a_run_was_refused(tmp_path):
    train(rounds=2, out=tmp_path)
    with pytest.raises(RunFolderError, match="cohort size") as caught:
        train(rounds=4, cohort_size=6, out=tmp_path)
    assert train(rounds=4, out=tmp_path).rounds == 4
    assert caught.value.__traceback__ is not None


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, which the child does not use
def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    """Which lives on when its parent was killed."""
    with lock.locked(tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        with pytest.raises(RunFolderError, match="Another training"), lock.locked(tmp_path):
            pytest.fail("two have it")
    try:
        with lock.locked(tmp_path):  # the child is still there
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_where_there_are_no_locks_training_goes_on(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", none)
    assert train(rounds=2, out=tmp_path).rounds == 2


def test_a_lock_that_was_removed_with_its_folder_is_nobody_elses(tmp_path):
    """The folder is removed and made again while one training has it."""
    folder = files.make_folder(tmp_path / "run")
    with lock.locked(folder):
        (folder / lock.NAME).unlink()
        with lock.locked(folder):  # the new one
            pass
        with lock.locked(folder):
            (folder / lock.NAME).rename(tmp_path / "elsewhere")
            (folder / lock.NAME).write_text("of a third one")
    assert (folder / lock.NAME).read_text() == "of a third one"


def test_a_folder_that_is_removed_while_it_trains_is_not_full(tmp_path):
    import shutil

    remove = lambda round, *_: round == 2 and shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"No such file.*removed") as caught:
        train(out=fg.run_folder(tmp_path / "run", every=1), callbacks=[remove])
    assert "Make room" not in str(caught.value)


def test_two_write_one_report_at_the_same_time(tmp_path, monkeypatch):
    """`fg.report` of a run that writes it, too."""
    fsync, nested = os.fsync, []

    def second(descriptor):
        if not nested:
            nested.append(True)
            files.write_whole(tmp_path / "report.html", b"second")
        return fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", second)
    files.write_whole(tmp_path / "report.html", b"first")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("report.html", b"first")]


def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path):
    (tmp_path / f"{CURRENT}.12345678.tmp").write_bytes(b"half")
    train(rounds=1, out=tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
