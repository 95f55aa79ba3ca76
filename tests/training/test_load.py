"""A run in its folder, read without its algorithm and its clients: `fg.load`."""

import json
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.training.files import RunFolderError
from line import FIRST, line, mean_square, points

CLIENTS = fg.population(points())


def train(algorithm, params=FIRST, rounds=4, **more):
    settings = {"cohort_size": 5, "key": jax.random.key(3), "progress": False}
    return fg.fit(algorithm, CLIENTS, params=params, rounds=rounds, **settings, **more)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


ALGORITHMS = {
    "its own": line(),
    "plain": fg.fed_avg(mean_square),
    "tuned": fg.self_tuning(fg.fed_avgm(mean_square), "server"),
    "averaged": fg.averaged(fg.fed_avg(mean_square)),
    "with client state": fg.scaffold(mean_square),
    "a race": fg.race({"a": fg.fed_avg(mean_square), "b": fg.fed_avg(mean_square, 0.2)}, {1: 1}),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_is_read_as_it_was(name, tmp_path):
    trained = train(ALGORITHMS[name], out=tmp_path)
    loaded = fg.load(tmp_path)
    assert same(loaded.params, trained.params)
    assert loaded.rounds == 4 and loaded.stopped is None and loaded.name == trained.name
    assert loaded.hyper == jax.tree.map(lambda x: np.asarray(x).item(), trained.hyper)
    for metric in trained.history:
        assert np.array_equal(loaded.history[metric], trained.history[metric])
        assert np.array_equal(loaded.history.rounds(metric), trained.history.rounds(metric))
    assert repr(loaded) == repr(trained)


@pytest.mark.parametrize("name", ["plain", "averaged", "with client state"])
def test_the_best_model_is_read_too(name, tmp_path):
    check = {"test": fg.Evaluation({"loss": mean_square}, CLIENTS, every=2)}
    keep = fg.keep_best("eval.test.loss", maximize=True)  # so it is not the last one
    trained = train(ALGORITHMS[name], evaluate=check, callbacks=[keep], out=tmp_path)
    loaded = fg.load(tmp_path).best
    assert same(loaded.params, trained.best.params) and repr(loaded) == repr(trained.best)
    assert not same(loaded.params, trained.params)


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


STRUCTURES = {
    "nested": {"deep": [{"w": jnp.ones(3)}, (jnp.zeros(2), jnp.float32(1.0))], "odd.name": None},
    "a tuple": (jnp.ones(3), {"w": jnp.ones(1)}),
    "bare": jnp.arange(3.0),
    "half": {"w": jnp.ones(3, jnp.bfloat16)},
}
OTHERS = {
    "a named tuple": Pair(jnp.ones(3), jnp.zeros(2)),
    "a module": eqx.nn.Linear(3, 1, key=jax.random.key(0)),
    "numbered": {0: jnp.ones(3), 1: jnp.ones(2)},
}


def squares(params, batch):
    total = sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(params))
    return total + 0 * batch["y"]


@pytest.mark.parametrize("name", STRUCTURES)
def test_dicts_lists_and_tuples_are_known(name, tmp_path):
    trained = train(fg.fed_avg(squares), STRUCTURES[name], rounds=2, out=tmp_path)
    assert same(fg.load(tmp_path).params, trained.params)
    assert same(fg.load(tmp_path, like=STRUCTURES[name]).params, trained.params)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_need_one_like_them(name, tmp_path):
    trained = train(fg.fed_avg(squares), OTHERS[name], rounds=2, out=tmp_path)
    loaded = fg.load(tmp_path)
    assert loaded.history["loss"].tolist() == trained.history["loss"].tolist()
    assert "like=params" in repr(loaded)
    with pytest.raises(RunFolderError, match=r"test_load.py.*Give a model like it.*like=params"):
        loaded.params
    assert same(fg.load(tmp_path, like=OTHERS[name]).params, trained.params)


def test_the_best_of_other_models(tmp_path):
    check = fg.Evaluation({"loss": squares}, CLIENTS, every=1)
    more = {"evaluate": check, "callbacks": [fg.keep_best("eval.loss")], "out": tmp_path}
    best = train(fg.fed_avg(squares), OTHERS["a module"], rounds=2, **more).best
    by_name = fg.load(tmp_path).best.params
    assert same(by_name, {"weight": best.params.weight, "bias": best.params.bias})
    assert same(fg.load(tmp_path, like=OTHERS["a module"]).best.params, best.params)


def test_a_model_that_is_not_like_it(tmp_path):
    train(fg.fed_avg(mean_square), out=tmp_path)
    with pytest.raises(RunFolderError, match=r"\['w'\] has shape \(3,\) there, and \(4,\) in like"):
        fg.load(tmp_path, like={"w": np.zeros(4)})
    with pytest.raises(RunFolderError, match=r"\['w'\] has shape \(3,\) there, and nothing"):
        fg.load(tmp_path, like={"v": np.zeros(3)})


def test_the_model_is_in_the_file_once(tmp_path):
    big = {"w": jnp.zeros(3), "more": jnp.zeros(50_000)}
    sizes = {}
    for name, algorithm in {
        "once": fg.fed_avg(squares),
        "two": fg.averaged(fg.fed_avg(squares)),
    }.items():
        train(algorithm, big, rounds=1, out=tmp_path / name)
        sizes[name] = (tmp_path / name / "checkpoint.npz").stat().st_size
    one = big["more"].nbytes
    assert sizes["once"] < 1.5 * one and sizes["two"] < 2.5 * one


def test_what_only_the_algorithm_knows(tmp_path):
    trained = train(fg.averaged(fg.fed_avg(mean_square)), out=tmp_path)
    loaded = fg.load(tmp_path)
    with pytest.raises(RunFolderError, match="known to the algorithm"):
        loaded.last
    assert np.array_equal(loaded.state.arrays["inner.params['w']"], trained.last["w"])


def test_why_it_stopped(tmp_path):
    stop = fg.Stop("loss", lambda values: len(values) == 2 and "good enough")
    train(line(), out=tmp_path, callbacks=[stop])
    assert fg.load(tmp_path).stopped == "good enough" and fg.load(tmp_path).rounds == 2
    train(line(), out=tmp_path)  # and then it went on
    assert fg.load(tmp_path).stopped is None and fg.load(tmp_path).rounds == 4


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RunFolderError, match=r"has no run: there is no checkpoint.npz"):
        fg.load(tmp_path)


def test_a_checkpoint_of_an_older_version(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgrad.training.models.kept", lambda *_: None)
    trained = train(line(), out=tmp_path)
    loaded = fg.load(tmp_path)
    assert loaded.history["loss"].tolist() == trained.history["loss"].tolist()
    with pytest.raises(RunFolderError, match="does not say which of its arrays are the model"):
        loaded.params


def test_what_a_run_was_made_of(tmp_path):
    work = fg.local_training(0.1, batch_size=10, epochs=2)
    train(fg.fed_adam(mean_square, work), out=tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())["algorithm"]
    assert found["name"] == "FedAdam" and found["weighting"] == "examples"
    client = {"batch_size": 10, "optimizer": "sgd", "epochs": 2, "shuffle": True}
    assert found["client"] == client
    assert found["server"] == {"optimizer": "adaptive, second_moment=adam"}
    train(fg.fed_auto(mean_square, batch_size=7), out=tmp_path / "auto", rounds=2)
    found = json.loads((tmp_path / "auto" / "config.json").read_text())["algorithm"]
    assert found["name"] == "fed_auto" and found["client"]["batch_size"] == 7
    assert found["candidates"]["Prodigy, nimble"] == {"server": {"optimizer": "prodigy"}}
