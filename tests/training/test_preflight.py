"""What is wrong is said first: before a client trains, in words that help."""

import inspect
import os
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg

RNG = np.random.default_rng(0)
CLIENTS = [
    {"x": RNG.normal(size=(n, 3)).astype(np.float32), "y": np.ones(n, np.float32)}
    for n in (4, 5, 6, 7)
]
POPULATION = fg.population(CLIENTS)
PARAMS = {"w": jnp.zeros(3, jnp.float32)}
trained = []  # of whom is asked; nobody should be


def loss(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


class Watched(fg.Population):
    """Clients that tell who asks them for a round."""

    def __len__(self):
        return len(POPULATION)

    def select(self, clients):
        trained.append(clients)
        return POPULATION.select(clients)


WATCHED = Watched()
FEDAVGM = fg.fed_avgm(loss, fg.local_training(0.01, batch_size=5))
EVALUATION = fg.Evaluation({"loss": loss}, POPULATION)
SPACE = {"server.learning_rate": fg.log_uniform(1e-3, 1)}
BOUNDED = fg.self_tuning(FEDAVGM, {"server.learning_rate": fg.log(1e-3, 1.5)})
SETTINGS = {
    "params": PARAMS,
    "rounds": 20,
    "cohort_size": 2,
    "key": jax.random.key(0),
    "progress": False,
}


def fit(**changes):
    given = {"algorithm": FEDAVGM, "clients": WATCHED, **SETTINGS, **changes}
    return fg.fit(**given)


def search(**changes):
    given = {"algorithm": FEDAVGM, "clients": WATCHED, "space": SPACE, "trials": 2}
    given |= {**SETTINGS, "evaluate": EVALUATION, **changes}
    return fg.random_search(**given)


def trains(round, state, metrics):
    trained.append(round)


def fails(params, batch):
    return batch["labels"]


def mixed(**dtypes):
    return [
        {"x": np.ones((2, 3), dtypes.get("x", np.float32)), "y": np.ones(2, dtypes.get("y", int))}
        for dtypes in ({}, dtypes)
    ]


# What a user writes, and what the message must say.
WRONG = {
    # the algorithm, and the model
    "a loss": (lambda: fit(algorithm=loss), "takes an algorithm, got function loss. Make one"),
    "not called": (
        lambda: fit(algorithm=fg.fed_avg),
        r"got function fed_avg. Call it: fg.fed_avg\(",
    ),
    "no model": (lambda: fit(params=None), "params= is the model to start with"),
    "an empty model": (lambda: fit(params={}), "params= is the model to start with"),
    "whole numbers": (lambda: fit(params={"w": jnp.arange(3)}), "must be a floating array"),
    "no loss": (lambda: fg.fed_avg(None), r"loss= takes a function \(params, batch\).* NoneType"),
    "a loss of the model alone": (
        lambda: fg.fed_avg(lambda params: 0.0),
        r"one loss per example, got <lambda>\(params\). A third argument is called `key`",
    ),
    "a loss of more": (lambda: fg.fed_auto(lambda p, b, table: 0.0), r"p, b, table\).*with_fixed"),
    "uphill": (lambda: fg.fed_avg(loss, -0.1), "learning_rate=-0.1: with less than 0 the loss"),
    "a rate of text": (
        lambda: FEDAVGM.starting({"server.learning_rate": "0.1"}),
        "'server.learning_rate' is the text '0.1'",
    ),
    "fixed arrays": (lambda: fg.fed_avg(loss, fixed={}), r"'fixed'. .* fg.with_fixed\(loss, fix"),
    "fixed arrays, by fed_auto": (lambda: fg.fed_auto(loss, fixed={}), r"fg.with_fixed\(loss, fix"),
    "fixed arrays, in training": (lambda: fit(fixed={}), r"fg.with_fixed\(loss, fixed\)"),
    "statistics of BatchNorm": (
        lambda: fit(params={"params": jnp.zeros(2), "batch_stats": jnp.zeros(2)}),
        r"'batch_stats', .* Give the weights alone, params\['params'\], .*fg.with_fixed",
    ),
    # clients
    "a list": (lambda: fit(clients=CLIENTS), r"takes a population.* got list. Write fg.population"),
    "a list to search on": (lambda: search(clients=CLIENTS), "got list. Write fg.population"),
    "a list to evaluate on": (
        lambda: fg.Evaluation({"loss": loss}, CLIENTS),
        "got list. Write fg.population",
    ),
    "a list to learn by": (
        lambda: fg.self_tuning(FEDAVGM, "server", gradient_from=CLIENTS),
        r'"same" or a population, got \'list\'. Write gradient_from=fg.population',
    ),
    "too large a cohort": (lambda: fit(cohort_size=9), "there are 4 clients"),
    "mixed dtypes": (
        lambda: fg.population(mixed(x=np.float64)),
        "client 1 are float64 in 'x', those of client 0 float32. Cast them",
    ),
    "labels that are not whole": (
        lambda: fg.population(mixed(y=np.float32)),
        "client 1 are float32 in 'y', those of client 0 int64",
    ),
    "words": (
        lambda: fg.population([{"x": np.array(["a", "b"])}]),
        "client 0 are <U1 in 'x', and JAX computes with numbers",
    ),
    # numbers
    "no rounds": (lambda: fit(rounds=0), "rounds=0: nothing is trained"),
    "no rounds to search": (lambda: search(rounds=0), "rounds=0: give a whole number"),
    "half a round": (lambda: fit(rounds=2.5), "rounds=2.5: give a whole number"),
    "a number for a folder": (lambda: fit(out=3), "out= takes a folder, .* got 3"),
    "a seed for a key": (lambda: fit(key=0), r"key=jax.random.key\(0\)"),
    # what belongs to the algorithm
    "an average": (lambda: fit(average=True), r"'average'. It belongs .* fg.averaged\(algorithm\)"),
    "an average of a search": (lambda: search(average=True), r"fg.averaged\(algorithm\)"),
    "a rate": (lambda: fit(learning_rate=0.1), r"fg.fed_avg\(loss, client_learning_rate=0.1,"),
    "epochs": (lambda: fit(epoch=3), r"Did you mean 'epochs'\? It belongs to the algorithm"),
    "a seed": (lambda: fit(seed=0), r"'seed'. Randomness is a key: key=jax.random.key\(0\)"),
    # starts outside of bounds
    "a start that is too high": (
        lambda: fit(algorithm=BOUNDED.starting({"server.learning_rate": 2.0})),
        "'server.learning_rate' starts at 2.0, outside of its bounds, 0.001 to 1.5",
    ),
    "a start that is too low": (
        lambda: fit(algorithm=fg.self_tuning(FEDAVGM, {"server.momentum": fg.linear(0.95, 0.99)})),
        r"'server.momentum' starts at 0.9.*widen them: fg.linear\(low, high\)",
    ),
    # evaluations
    "a metric that fails": (
        lambda: fit(evaluate={"test": fg.Evaluation({"accuracy": fails}, POPULATION)}),
        "labels",
    ),
    "a metric of other clients": (
        lambda: fit(evaluate=fg.Evaluation({"loss": loss}, fg.population(mixed()))),
        "dtype",
    ),
    "a metric instead of an evaluation": (
        lambda: fit(evaluate={"loss": loss}),
        r'loss takes other arguments.*fg.Evaluation\(\{"loss": loss\}, clients\)',
    ),
    "a list of evaluations": (lambda: fit(evaluate=[EVALUATION]), "or several by name"),
    "waiting for another": (
        lambda: fit(evaluate={"test": EVALUATION}, callbacks=[fg.early_stop("eval.tst.loss")]),
        "Did you mean 'eval.test.loss'",
    ),
    "waiting for what no round gives": (
        lambda: fit(clients=POPULATION, callbacks=[trains, fg.early_stop("los")]),
        "No round gives a metric 'los'. Did you mean 'loss'",
    ),
    "waiting for what is not learned": (
        lambda: fit(clients=POPULATION, callbacks=[trains, fg.early_stop("hyper.server")]),
        "No round gives a metric 'hyper.server'",
    ),
    "a callback alone": (lambda: fit(callbacks=print), "callbacks= takes a list"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_said_before_a_client_trains(wrong):
    write, says = WRONG[wrong]
    trained.clear()
    with pytest.raises(Exception, match=says) as caught:
        write()
    assert not trained
    if isinstance(caught.value, fg.FederatedError):
        assert os.path.basename(__file__) in str(caught.value)
    else:  # of the user's own code, as Python says it
        assert caught.traceback[-1].path.name == os.path.basename(__file__) or "jax" in str(
            caught.traceback[-1].path
        )


def test_who_trains_is_seen():
    """Or the tests above would see nothing."""
    trained.clear()
    fit(rounds=2)
    assert len(trained) == 2


# --- misspelled arguments -----------------------------------------------------------------------

ROOMS = (fg, fg.executors, fg.tasks, fg.tasks.split, fg.federation)
# What users are given, and do not make.
GIVEN = {
    "Audit",
    "Cohort",
    "Examples",
    "Explanation",
    "Form",
    "History",
    "Optimizer",
    "Phases",
    "Range",
}
GIVEN |= {"Plan", "Population", "Program", "Result", "Search", "Traffic", "Executor", "Context"}
GIVEN |= {"Envelope", "InProcess", "NodePopulation", "NodeValue", "Report", "StageProgram"}


def public():
    for room in ROOMS:
        for name in getattr(room, "__all__", vars(room)):
            value = getattr(room, name)
            ours = getattr(value, "__module__", "").startswith("fedgrad")
            ours &= name != "known_arguments"
            made = inspect.isclass(value) and not issubclass(value, Exception)
            if not ours or name[0] == "_" or name in GIVEN:
                continue
            if made or inspect.isfunction(value):
                kinds = inspect.signature(value).parameters.values()
                named = [
                    p.name for p in kinds if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
                ]
                if named and all(p.kind is not p.VAR_KEYWORD for p in kinds):
                    what = f"{room.__name__}.{name}"
                    yield pytest.param(name, value, max(named, key=len), id=what)


@pytest.mark.parametrize("name, function, argument", list(public()))
def test_a_misspelled_argument_is_answered_with_the_one_that_was_meant(name, function, argument):
    if len(argument) < 3:
        pytest.skip("too short to be misspelled")
    wrong = argument[:-2] + argument[-1]
    with pytest.raises(fg.ArgumentError) as caught:
        function(**{wrong: None})
    assert f"{name}() has no argument {wrong!r}. Did you mean {argument!r}?" in str(caught.value)
    assert os.path.basename(__file__) in str(caught.value)


def test_what_is_public_can_still_be_sent_to_other_processes():
    functions = (fg.fit, fg.population, fg.fed_avg, fg.local_training, fg.run_folder)
    for value in (*functions, fg.Trials(3), fg.CostModel(up=2.0), fg.run_folder("runs/1")):
        assert pickle.loads(pickle.dumps(value)) == value


def test_float64_is_float32_where_jax_says_so_and_nobody_is_warned():
    clients = mixed(x=np.float64)
    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fg.population(clients).everyone.store["x"].dtype == np.float32
