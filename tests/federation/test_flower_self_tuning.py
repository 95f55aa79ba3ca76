"""Flower apps that tune themselves: hypergradients of any strategy, and what can go wrong."""

import functools
import logging
import math
import random
import subprocess
import sys

import numpy as np
import optax
import pytest

pytest.importorskip("flwr", reason="Flower apps need the extra: fedgrad[flower]")

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    QFedAvg,
)

import flower_apps as apps
from fedgrad.core.errors import ArgumentError
from fedgrad.federation import InProcessGrid, SelfTuning, derivatives
from fedgrad.federation.flower.coordinates import Coordinate
from fedgrad.federation.flower.learn_arguments import starting
from fedgrad.federation.protocol.federation_errors import FederationError

ROUNDS = 3
NO_EVALUATION = {"fraction_evaluate": 0.0}


class Shrinking(FedAvg):
    """A strategy of a user: the mean, a part of the way, and smaller."""

    def __init__(self, way=0.8, shrink=0.02, **how):
        super().__init__(**how)
        self.way, self.shrink, self.model = way, shrink, None

    def configure_train(self, server_round, arrays, config, grid):
        self.model = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            return None, metrics
        new, old = apps.arrays(arrays), apps.arrays(self.model)
        keep = np.exp(-self.shrink)
        mixed = {n: np.asarray(keep * (old[n] + self.way * (new[n] - old[n]))) for n in new}
        return apps.record(mixed), metrics


STRATEGIES = {
    "FedAvg": lambda: FedAvg(**NO_EVALUATION),
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.9, server_momentum=0.5, **NO_EVALUATION),
    "FedAdam": lambda: FedAdam(eta=0.05, tau=0.01, **NO_EVALUATION),
    "FedYogi": lambda: FedYogi(eta=0.05, tau=0.01, **NO_EVALUATION),
    "FedAdagrad": lambda: FedAdagrad(eta=0.05, tau=0.01, **NO_EVALUATION),
    "FedMedian": lambda: FedMedian(**NO_EVALUATION),
    "FedTrimmedAvg": lambda: FedTrimmedAvg(**NO_EVALUATION),
    "QFedAvg": lambda: QFedAvg(client_learning_rate=0.2, q=0.3, **NO_EVALUATION),
    "Shrinking": lambda: Shrinking(**NO_EVALUATION),
}
LEARNED = {  # by each strategy, of its own
    "FedAvg": [],
    "FedAvgM": ["server_learning_rate", "server_momentum"],
    "FedAdam": ["eta", "beta_1", "beta_2", "tau"],
    "FedYogi": ["eta", "beta_1", "beta_2", "tau"],
    "FedAdagrad": ["eta", "tau"],
    "FedMedian": [],
    "FedTrimmedAvg": [],
    "QFedAvg": ["client_learning_rate", "q"],
    "Shrinking": ["way", "shrink"],
}
BUFFERS = {"QFedAvg": {}}  # it cannot do whole numbers
TABLE = [(kind, name) for kind, own in LEARNED.items() for name in [*own, "lr"]]


def started(
    tuned, rounds=ROUNDS, dtype=np.float64, app=None, lr=apps.LR, buffer=apps.BUFFER, **how
):
    grid = InProcessGrid(app or apps.tuned_app(dtype, buffer=buffer), apps.NODES)
    return tuned.start(
        grid, apps.initial(dtype, buffer), num_rounds=rounds, train_config=apps.settings(lr), **how
    )


def metrics(result):
    return [dict(found) for _, found in sorted(result.train_metrics_clientapp.items())]


@pytest.fixture(scope="module")
def slopes():
    """Derivatives of the loss after the last round, by what that round used: differences of it."""

    def slope(kind, name):
        value = apps.LR if name == "lr" else getattr(STRATEGIES[kind](), name)
        step = 1e-4 * starting(name, value, None, name)[1].slope(value)

        def after(value):
            def change(strategy, config):
                if name == "lr":
                    config["lr"] = value
                else:
                    setattr(strategy, name, value)

            return apps.loss_after(
                STRATEGIES[kind](), ROUNDS, change, BUFFERS.get(kind, apps.BUFFER)
            )

        return (after(value + step) - after(value - step)) / (2 * step), value

    return functools.cache(slope)


@pytest.fixture(scope="module")
def hypergradients():
    """What SelfTuning finds one round later, with all numbers held where they are."""

    def run(kind, dtype):
        frozen = SelfTuning(STRATEGIES[kind](), LEARNED[kind], ["lr"], optax.sgd(0.0))
        buffer = BUFFERS.get(kind, apps.BUFFER)
        return metrics(started(frozen, ROUNDS + 1, dtype, buffer=buffer))[-1]

    return functools.cache(run)


@pytest.mark.parametrize("dtype, error", [("float64", 1e-6), ("float32", 2e-3)])
@pytest.mark.parametrize("kind, name", TABLE)
def test_hypergradients_are_derivatives_of_the_loss(
    kind, name, dtype, error, slopes, hypergradients
):
    wanted, value = slopes(kind, name)
    coordinate = starting(name, value, None, name)[1]
    found = hypergradients(kind, np.dtype(dtype).type)[f"hypergradient.{name}"]
    assert wanted != 0.0
    assert found / coordinate.slope(value) == pytest.approx(wanted, rel=error)


def test_an_attribute_is_nudged_where_it_is_and_as_little_as_needed():
    """What is learned of a fraction is the logit of its part, of a rate the logarithm."""
    for coordinate, value in ((Coordinate(0.0, 0.999), 0.9), (Coordinate(1e-3, 10.0), 0.3)):
        raw = coordinate.raw(value)
        assert coordinate.value(raw) == pytest.approx(value, rel=1e-12)
        slope = (coordinate.value(raw + 1e-6) - coordinate.value(raw - 1e-6)) / 2e-6
        assert coordinate.slope(value) == pytest.approx(slope, rel=1e-6)
        for step in (-1e9, -1.0, 1.0, 1e9):
            moved = coordinate.moved(value, step)
            assert coordinate.low <= moved <= coordinate.high
            assert (moved > value) == (step > 0)
            assert math.isfinite(coordinate.raw(moved))


# --- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"])
def test_training_from_a_small_rate_is_better_than_without(kind):
    own = LEARNED[kind][:1]  # its rate
    begun = {"server_learning_rate": 0.9, "eta": 0.003}
    strategies = [STRATEGIES[kind]() for _ in range(2)]
    for strategy in strategies:
        for name in own:
            setattr(strategy, name, begun[name])
    fixed, tuned = strategies[0], SelfTuning(strategies[1], own, ["lr"])
    app = apps.tuned_app(change=apps.plain)
    plain = apps.mean_loss(started(fixed, 15, app=app, lr=0.003).arrays)
    learning, begin = started(tuned, 15, lr=0.003).arrays, apps.mean_loss(apps.initial())
    assert begin - apps.mean_loss(learning) > 1.5 * (begin - plain) > 0
    assert all(tuned.hyper[name] > begun[name] for name in own) and tuned.hyper["lr"] > 0.003


class Watched(InProcessGrid):
    """A grid that remembers the config of each message."""

    def __init__(self, app):
        super().__init__(app, apps.NODES)
        self.configs = []

    def push_messages(self, messages):
        messages = list(messages)
        self.configs += [dict(message.content["config"]) for message in messages]
        return super().push_messages(messages)


def test_clients_receive_what_is_learned_and_metrics_tell_it():
    tuned = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], ["lr"])
    grid = Watched(apps.tuned_app())
    result = tuned.start(grid, apps.initial(), num_rounds=4, train_config=apps.settings())
    found, sent = metrics(result), [config["lr"] for config in grid.configs[:: apps.NODES]]
    assert [m["hyper.lr"] for m in found] == sent and sent[0] == apps.LR != sent[-1]
    assert {tuple(config["fedgrad.learn"]) for config in grid.configs} == {("lr",)}
    # What the first round used is judged by the second.
    assert "hypergradient.lr" not in found[0] and "hypergradient.lr" in found[1]
    used = [m["hyper.server_learning_rate"] for m in found]
    assert used[0] == 0.9 != used[1] and used[-1] == tuned.strategy.server_learning_rate
    assert found[0]["fedgrad.loss"] == pytest.approx(apps.mean_loss(apps.initial()))
    assert found[0]["train_loss"] == pytest.approx(found[0]["fedgrad.loss"])  # the app's own


def test_what_is_held_still_trains_as_without_to_the_last_bit():
    """Neither the nudges nor the records change what is sampled, summed or logged."""
    models, logs = [], []
    for held in (False, True):
        handler = Kept()
        logging.getLogger("flwr").addHandler(handler)
        random.seed(5)
        try:
            strategy = FedAvgM(0.6, 0.0, server_learning_rate=0.9, server_momentum=0.5)
            names = ["server_learning_rate", "server_momentum"]
            app = apps.tuned_app(change=apps.plain)
            if held:
                strategy, app = SelfTuning(strategy, names, ["lr"], optax.sgd(0.0)), None
            models.append(apps.arrays(started(strategy, 4, app=app).arrays))
        finally:
            logging.getLogger("flwr").removeHandler(handler)
        logs.append([line for line in handler.lines if "configure" in line or "aggregate" in line])
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[0])
    assert logs[0] == logs[1] and len(logs[0]) == 8


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_fedavgm_that_is_a_plain_mean_at_its_start_is_not_one_any_more():
    tuned = SelfTuning(FedAvgM(fraction_evaluate=0.0), ["server_learning_rate"])
    started(tuned, 3)
    assert tuned.hyper["server_learning_rate"] != 1.0


def test_bounds_hold():
    wanted = {"server_learning_rate": (0.8, 1.0), "server_momentum": (0.0, 0.55)}
    tuned = SelfTuning(STRATEGIES["FedAvgM"](), wanted, {"lr": (0.15, 0.25)}, optax.sgd(1e3))
    for found in metrics(started(tuned, 6)):
        for name, (low, high) in {**wanted, "lr": (0.15, 0.25)}.items():
            assert low <= found[f"hyper.{name}"] <= high
    assert tuned.hyper["lr"] in (0.15, 0.25)


class Noisy(Shrinking):
    """Adds noise, as private ones do, and takes replies apart."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        for reply in replies:
            reply.content["arrays"].clear()
        noisy = {n: x + np.random.normal(size=x.shape) for n, x in apps.arrays(arrays).items()}
        return apps.record(noisy), metrics


def test_a_strategy_may_draw_numbers_and_change_what_it_gets():
    np.random.seed(3)
    tuned = SelfTuning(Noisy(**NO_EVALUATION), ["way"], ["lr"], optax.sgd(0.0))
    found = metrics(started(tuned, 2))[-1]
    np.random.seed(3)
    started(Noisy(**NO_EVALUATION), 2, app=apps.tuned_app(change=apps.plain))
    drawn = np.random.normal()
    np.random.seed(3)
    started(SelfTuning(Noisy(**NO_EVALUATION), ["way"], ["lr"], optax.sgd(0.0)), 2)
    assert np.random.normal() == drawn  # nudges take none
    # Noise of two nudges that differed would be thousands of times the derivative.
    assert 0 < abs(found["hypergradient.way"]) < 100


class OwnLoop(Shrinking):
    """With a loop of its own, as Flower's templates have."""

    def start(self, grid, initial_arrays, **how):
        self.begun = True
        result = super().start(grid, initial_arrays, **how)
        self.finished = self.way
        return result


def test_a_loop_of_the_strategy_is_run():
    tuned = SelfTuning(OwnLoop(**NO_EVALUATION), ["way"])
    assert len(metrics(started(tuned))) == ROUNDS
    assert tuned.strategy.begun and tuned.strategy.finished == tuned.hyper["way"] != 0.8


def test_evaluation_is_that_of_the_strategy():
    result = started(SelfTuning(FedAvg(), client=["lr"]), 2)
    found = result.evaluate_metrics_clientapp[2]["eval_loss"]
    assert found == pytest.approx(apps.mean_loss(result.arrays))


# --- clients that fail ---------------------------------------------------------------------------


def failing(when):
    def change(node, round, content):
        if when(node, round):
            raise RuntimeError("out of memory")
        return content

    return apps.tuned_app(change=change)


def test_clients_that_fail_are_left_out():
    def hold():
        return SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], ["lr"], optax.sgd(0.0))

    found = metrics(started(hold(), 2, app=failing(lambda node, round: node == 4)))[-1]
    four = InProcessGrid(apps.tuned_app(), apps.NODES - 1)
    result = hold().start(four, apps.initial(), num_rounds=2, train_config=apps.settings())
    assert found["hypergradient.lr"] == pytest.approx(metrics(result)[-1]["hypergradient.lr"])


def test_a_round_in_which_all_fail_changes_nothing():
    for number in (1, 2, 3):
        tuned = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], ["lr"])
        result = started(tuned, 4, app=failing(lambda node, round: round == number))
        assert sorted(result.train_metrics_clientapp) == sorted({1, 2, 3, 4} - {number})
        usual = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], ["lr"])
        assert apps.mean_loss(result.arrays) == pytest.approx(
            apps.mean_loss(started(usual, 3).arrays)
        )


def changed(names):
    return lambda node, round, content: {
        name: found for name, found in content.items() if node != 2 or not name.startswith(names)
    }


@pytest.mark.parametrize(
    "change, said",
    [
        (apps.plain, r"node \d has no gradient.*torch_sgd"),
        (changed("fedgrad"), "node 3 has no gradient"),
        (changed("fedgrad.tangent"), "node 3 has no tangent by 'lr'"),
        (
            lambda node, round, content: {
                **content,
                **(derivatives({"bias": np.ones(())}, 1.0, 3) if node == 2 else {}),
            },
            "node 3 has other names or shapes",
        ),
        (
            lambda node, round, content: {
                **content,
                **derivatives({"b": np.ones(())}, 1.0, 3, {"lr": {"b": np.ones(())}}),
            },
            "tangent of 'b', which the model has not",
        ),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])  # Flower draws the order of the nodes by it
def test_clients_that_forget_are_told(change, said, seed):
    random.seed(seed)
    tuned = SelfTuning(STRATEGIES["FedAvg"](), client=["lr"])
    with pytest.raises(FederationError, match=said):
        started(tuned, app=apps.tuned_app(change=change))


def test_tangents_fit_the_gradient():
    with pytest.raises(ArgumentError, match=r"other arrays than the gradient: \['b'\]"):
        derivatives({"a": np.ones(2)}, 1.0, 3, {"lr": {"a": np.ones(2), "b": np.ones(2)}})


# --- what must not happen ------------------------------------------------------------------------


def test_a_model_that_is_not_finite_is_undone():
    def change(node, round, content):
        if round == 2:
            content["arrays"] = apps.record(
                {n: x * np.nan for n, x in apps.arrays(content["arrays"]).items()}
            )
        return content

    names = ["server_learning_rate", "server_momentum"]
    tuned = SelfTuning(STRATEGIES["FedAvgM"](), names, ["lr"], optax.sgd(0.0))
    result = started(tuned, 3, app=apps.tuned_app(change=change))
    assert [m["fedgrad.rejected"] for m in metrics(result)] == [0, 1, 1]
    assert tuned.hyper == pytest.approx(
        {"server_learning_rate": 0.45, "server_momentum": 0.25, "lr": apps.LR / 2}
    )
    once = started(SelfTuning(STRATEGIES["FedAvgM"](), names, ["lr"], optax.sgd(0.0)), 1)
    assert metrics(result)[2]["fedgrad.loss"] == pytest.approx(apps.mean_loss(once.arrays))
    assert np.isfinite(apps.mean_loss(result.arrays))


def test_a_loss_that_runs_away_is_undone_with_the_state_of_the_strategy():
    def change(node, round, content):
        if round == 3:  # tells of the model of round 2
            content["fedgrad"]["loss"] = 1e6
        return content

    tuned = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], optimizer=optax.sgd(0.0))
    result = started(tuned, 3, app=apps.tuned_app(change=change))
    once = STRATEGIES["FedAvgM"]()
    first = started(once, 1, app=apps.tuned_app(change=apps.plain)).arrays
    assert metrics(result)[-1]["fedgrad.rejected"] == 1
    assert tuned.strategy.server_learning_rate == pytest.approx(0.45)
    found, wanted = (apps.arrays(record) for record in (result.arrays, first))
    assert all(np.allclose(found[name], wanted[name]) for name in wanted)
    for a, b in zip(tuned.strategy.momentum_vector, once.momentum_vector, strict=True):
        np.testing.assert_allclose(a, b)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("times, undone", [(9.0, 0), (13.0, 1)])
def test_how_much_is_too_much_does_not_depend_on_the_scale_of_the_loss(times, undone, scale):
    def change(node, round, content):
        content["fedgrad"]["loss"] = scale * (times if round == 3 else 1.0)
        return content

    tuned = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], optimizer=optax.sgd(0.0))
    found = metrics(started(tuned, 3, app=apps.tuned_app(change=change)))
    assert found[-1]["fedgrad.rejected"] == undone


@pytest.mark.parametrize("losses, undone", [([0, 5, 54], 0), ([0, 5, 56], 1)])
def test_a_first_loss_of_zero_says_nothing(losses, undone):
    def change(node, round, content):
        content["fedgrad"]["loss"] = float(losses[round - 1])
        return content

    tuned = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], optimizer=optax.sgd(0.0))
    found = metrics(started(tuned, 3, app=apps.tuned_app(change=change)))
    assert found[-1]["fedgrad.rejected"] == undone


def test_what_is_not_finite_moves_nothing():
    def change(node, round, content):
        if round == 2 and node == 1:
            ones = {name: np.full(shape, np.inf) for name, shape in apps.SHAPES.items()}
            content["fedgrad.gradient"] = apps.record(ones)
        return content

    tuned = SelfTuning(STRATEGIES["FedAvg"](), client=["lr"])
    found = metrics(started(tuned, 3, app=apps.tuned_app(change=change)))
    assert [m["fedgrad.rejected"] for m in found] == [0, 1, 1]
    assert found[2]["hyper.lr"] == apps.LR


def test_there_is_nothing_to_learn_from_a_loss_that_is_not_finite():
    def change(node, round, content):
        content["fedgrad"]["loss"] = math.nan
        return content

    with pytest.raises(FederationError, match="loss of the first model is nan"):
        started(SelfTuning(FedAvg(), client=["lr"]), app=apps.tuned_app(change=change))


def test_what_has_no_effect_is_an_error():
    tuned = SelfTuning(STRATEGIES["FedAdam"](), ["eta", "eta_l"])
    with pytest.raises(ArgumentError, match="FedAdam does not use 'eta_l'"):
        started(tuned)

    def change(node, round, content):
        zeros = {name: np.zeros(shape) for name, shape in apps.SHAPES.items()}
        return {**content, "fedgrad.tangent.lr": apps.record(zeros)}

    with pytest.raises(FederationError, match="tangents by 'lr' of all clients are zero"):
        started(SelfTuning(FedAvg(), client=["lr"]), app=apps.tuned_app(change=change))


class Uncopied(FedAvg):
    def __init__(self):
        super().__init__()
        self.file = open(__file__)


PRIVATE = lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 5)


@pytest.mark.parametrize(
    "strategy, how, said",
    [
        (lambda: 3, {"server": ["eta"]}, "takes a strategy of flwr.serverapp.strategy"),
        (FedAvg, {}, "learns nothing"),
        (FedAvgM, {"server": "eta"}, r"give a tuple of names, \('eta',\)"),
        (FedAvgM, {"server": ["server_learning_rat"]}, "Did you mean 'server_learning_rate'"),
        (
            FedAvgM,
            {"server": ["min_train_nodes", "weighted_by_key"]},
            "'num-examples', which is no",
        ),
        (FedAvgM, {"server": ["server_momentum"]}, "is 0, from where.*server_momentum=0.1"),
        (FedAdagrad, {"server": ["beta_1"]}, "FedAdagrad.beta_1 is 0"),
        (FedAdam, {"server": {"eta": (0.5, 1.0)}}, r"eta is 0.1, which is not inside .*0.5, 1.0"),
        (FedAdam, {"server": {"eta": 0.5}}, "give bounds"),
        (FedAdam, {"server": {"eta": (1.0, 0.5)}}, "give bounds"),
        (FedAdam, {"server": ["eta"], "client": ["eta"]}, "'eta' is in server= and in client="),
        (PRIVATE, {"client": ["lr"]}, "guarantee would not hold"),
    ],
)
def test_what_cannot_be_learned_is_refused_before_the_first_round(strategy, how, said):
    with pytest.raises(ArgumentError, match=said) as error:
        SelfTuning(strategy(), **how)
    assert "test_flower_self_tuning.py" in str(error.value)


def test_arrays_that_were_sent_are_shared_by_copies():
    """To be sent, Flower cuts them into views of their bytes, which cannot be copied."""
    start = apps.initial()
    for array in start.values():
        array.slice_array()
    tuned = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], ["lr"])
    grid = InProcessGrid(apps.tuned_app(), apps.NODES)
    result = tuned.start(grid, start, num_rounds=2, train_config=apps.settings())
    usual = SelfTuning(STRATEGIES["FedAvgM"](), ["server_learning_rate"], ["lr"])
    assert apps.mean_loss(result.arrays) == pytest.approx(apps.mean_loss(started(usual, 2).arrays))


def test_a_strategy_that_cannot_be_copied_is_refused():
    strategy = Uncopied()
    with pytest.raises(ArgumentError, match=r"Uncopied cannot be copied .*__deepcopy__"):
        SelfTuning(strategy, client=["lr"])
    strategy.file.close()


@pytest.mark.parametrize(
    "config, said",
    [
        ({}, r"train_config has no 'lr'.*ConfigRecord\(\{'lr': 0.1\}\)"),
        ({"lrs": 0.1}, "Did you mean 'lrs'"),
        ({"lr": 0.0}, r"train_config\['lr'\] is 0, from where"),
        ({"lr": "0.1"}, "is '0.1', which is no number"),
        ({"lr": True}, "is True, which is no number"),
    ],
)
def test_settings_are_checked_before_the_first_round(config, said):
    sent = Watched(apps.tuned_app())
    tuned = SelfTuning(FedAvg(), client=["lr"])
    with pytest.raises(ArgumentError, match=said):
        tuned.start(sent, apps.initial(), num_rounds=1, train_config=ConfigRecord(config))
    assert not sent.configs


def test_importing_the_federation_imports_neither_flower_nor_torch():
    code = "import sys, fedgrad.federation; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"flwr", "torch"} & set(done.stdout.split())
