"""An algorithm of one's own: its contract, read from its messages; and what is not there."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from by_hand import CLIENTS, POPULATION, START, as_params, loss
from fedgrad.core.missing_names import ABSENT
from laws import EXECUTORS
from where import ROOT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    params: object
    count: object


def first(params, hyper):
    return Own(params, jnp.int32(0))


def given(result=None, **more):
    """An algorithm that is right, but for what is said; `result` changes what a round gives."""
    result = result or (lambda state, shift, batch: (state, fg.Metrics(loss=shift)))

    @fg.program(cohort=fg.CLIENTS)
    def round(state, hyper, cohort, key):
        batch, _ = cohort.batch(0, 4)
        shift = fg.mean(jnp.mean(batch["y"]))
        return result(dataclasses.replace(state, count=state.count + 1), shift, batch)

    parts = {"init": first, "round": round, "hyper": {"rate": 0.1}, "loss": loss} | more
    return fg.Algorithm(**parts)


def played(result, executor=None):
    algorithm = given(result)
    if executor is not None:
        algorithm = algorithm.on(executor)
    return train(algorithm)


def train(algorithm):
    return fg.fit(
        algorithm,
        POPULATION,
        params=as_params(START),
        rounds=2,
        cohort_size=2,
        key=jax.random.key(0),
        progress=False,
    )


def test_the_contract_is_kept():
    result = train(given())
    assert int(result.state.count) == 2 and np.isfinite(result.history["loss"]).all()


@fg.program(cohort=fg.CLIENTS)
def short(state, hyper, cohort):
    return state, fg.Metrics()


@fg.program(key=fg.CLIENTS)
def misplaced(state, hyper, cohort, key):
    return state, fg.Metrics()


@fg.program(cohort=fg.CLIENTS, state=fg.CLIENTS)
def at_clients(state, hyper, cohort, key):
    return state, fg.Metrics()


@fg.program(cohort=fg.CLIENTS, other=fg.CLIENTS)
def further(state, hyper, cohort, key, other):
    return state, fg.Metrics()


@fg.program(cohort=fg.CLIENTS)
def keeping_at_the_server(state, hyper, cohort, key, client_state):
    return state, fg.Metrics(), client_state


@fg.program(cohort=fg.CLIENTS, client_state=fg.CLIENTS)
def keeping(state, hyper, cohort, key, client_state):
    return state, fg.Metrics(), client_state


@fg.program(cohort=fg.CLIENTS, client_state=fg.CLIENTS)
def giving_the_server_away(state, hyper, cohort, key, client_state):
    return state, fg.Metrics(), jnp.sum(state.params["w"])


def of_a_client(params, clients):
    return jnp.zeros(())


class Plain:
    def __init__(self, params):
        self.params = params


MADE = {
    "init": (lambda: given(init=lambda params: params), r"init= is called with \(params, hyper\)"),
    "no init": (lambda: given(init=3), r"init=3 is no function. Write def init\(params, hyper\)"),
    "plain round": (lambda: given(round=lambda *a: a), r"is no program. Decorate it: @fg.program"),
    "short round": (lambda: given(round=short), r"takes 3 arguments by position.*called with four"),
    "cohort": (lambda: given(round=misplaced), r"third argument, 'cohort'.*@fg.program\(cohort="),
    "state": (lambda: given(round=at_clients), r"'state' is placed at clients, but it is the ser"),
    "hyper": (lambda: given(hyper=0.1), r"hyper=0.1: give a dict of numbers by name"),
    "words": (lambda: given(hyper={"a": {"b": "fast"}}), r"hyperparameter 'a.b' is str 'fast'"),
    "loss": (lambda: given(loss=None), r"loss=None is no function. Give loss\(params, batch\)"),
    "nobody gives": (lambda: given(round=further), r"nobody gives it 'other'.*cohorts="),
    "nobody keeps": (lambda: given(round=keeping), r"nobody gives it 'client_state'.*client_init="),
    "cohort missing": (
        lambda: given(cohorts={"other": None}),
        r"cohorts= has 'other', so it takes 'other', at clients",
    ),
    "state of clients missing": (
        lambda: given(client_init=of_a_client),
        r"client_init= is given, so it takes 'client_state', at clients",
    ),
    "state of clients misplaced": (
        lambda: given(round=keeping_at_the_server, client_init=of_a_client),
        r"client_init= is given, so it takes 'client_state', at clients",
    ),
    "client_init": (
        lambda: given(round=keeping, client_init=lambda params: params),
        r"client_init= is called with \(params, clients\)",
    ),
    "before_round": (
        lambda: given(before_round=lambda state: state),
        r"before_round= is called with \(state, d",
    ),
    "first state": (
        lambda: given(init=lambda params, hyper: params).init(as_params(START)),
        r"gave dict, which has no `params`.*register_dataclass",
    ),
    "no pytree": (
        lambda: given(init=lambda params, hyper: Plain(params)).init(as_params(START)),
        r"gave Plain, which is no pytree",
    ),
    "server's for clients": (
        lambda: train(given(round=giving_the_server_away, client_init=of_a_client)),
        r"client_state is at the server, but clients keep it. Send it: fg.broadcast",
    ),
}
ROUNDS = {  # what a round gives: (state, mean, batch) ->
    "no pair": (lambda s, m, b: s, r"round: a round gives \(state, metrics\), not Own"),
    "three": (lambda s, m, b: (s, fg.Metrics(), m), r"gives \(state, metrics\), not 3 values"),
    "metrics": (lambda s, m, b: (s, {"loss": m}), r"its metrics are dict. Give\s+fg.Metrics"),
    "no model": (lambda s, m, b: (s.count, fg.Metrics()), r"which has no `params`"),
    "another structure": (
        lambda s, m, b: (dataclasses.replace(s, params={"w": s.params["w"]}), fg.Metrics()),
        r"another structure after a round, without .params\['b'\]",
    ),
    "another dtype": (
        lambda s, m, b: (dataclasses.replace(s, count=s.count * 1.0), fg.Metrics()),
        r"the state.count was int32\[\], and is float.. *\[\] after a round",
    ),
    "another shape": (
        lambda s, m, b: (dataclasses.replace(s, count=s.count + jnp.arange(2)), fg.Metrics()),
        r"the state.count was int32\[\], and is int\d\d\[2\] after",
    ),
    "a metric of clients": (
        lambda s, m, b: (s, fg.Metrics(loss=b["y"][0])),
        r"metrics.loss is at clients, one for each client.*fg.mean",
    ),
    "a model of clients": (
        lambda s, m, b: (
            dataclasses.replace(s, params={"b": b["y"][0], "w": b["x"][0]}),
            fg.Metrics(),
        ),
        r"state.params\['b'\] is at clients, one for each client.*fg.mean",
    ),
}


@pytest.mark.promotes("dtype")
@pytest.mark.parametrize(
    "mistake, message",
    [
        *MADE.values(),
        *((lambda result=result: played(result), message) for result, message in ROUNDS.values()),
    ],
    ids=[*MADE, *ROUNDS],
)
def test_a_breach_says_what_where_and_the_fix(mistake, message):
    with pytest.raises(fg.ArgumentError, match=message) as raised:
        mistake()
    assert str(raised.value).startswith(__file__), "it names the line of the user"


@pytest.mark.promotes("dtype")
@pytest.mark.parametrize(
    "around", [fg.averaged, fg.holding_out, lambda a: a.on(EXECUTORS["reference"])]
)
def test_a_breach_is_seen_through_what_is_around(around):
    result, message = ROUNDS["no pair"]
    with pytest.raises(fg.ArgumentError, match=message):
        train(around(given(result)))


def test_a_round_is_looked_at_while_it_is_traced_and_costs_nothing_then():
    looks = []

    def result(state, shift, batch):
        looks.append(1)
        return state, fg.Metrics(loss=shift)

    algorithm = given(result)
    again = dataclasses.replace(algorithm, hyper={"rate": 0.2})
    assert again.round is algorithm.round, "looked at once, however often it is copied"
    train(algorithm)
    assert len(looks) == 1


# ---- where an example is in its client's data


def marked(examples, key=None, **how):
    """Each client notes, at the place of each of its examples, what that is."""

    def step(carry, batch, mask, index):
        return carry.at[index].set(batch["y"])

    return examples.fold(step, jnp.full(8, -1.0), 3, key=key, **how)


DATA = [{"y": 10.0 * i + np.arange(n)} for i, n in enumerate((7, 3, 5))]
WHERE = {
    "in order": (lambda e, key: marked(e), False),
    "shuffled": (lambda e, key: marked(e, key), False),
    "epochs": (lambda e, key: marked(e, key, epochs=2), False),
    "steps": (lambda e, key: marked(e, key, steps=6), False),
    "a part": (lambda e, key: marked(fg.HeldOut(0.4).split(e)[0], key), True),
}


@pytest.mark.parametrize("executor", ["local", "reference", "chunked"])
@pytest.mark.parametrize("mark, some", WHERE.values(), ids=WHERE)
def test_the_index_of_an_example_is_its_place_in_the_clients_data(mark, some, executor):
    @fg.program(cohort=fg.CLIENTS)
    def notes(key, cohort):
        return mark(cohort, fg.client_key(key))

    population = fg.population(DATA)
    found = notes.on(EXECUTORS[executor])(jax.random.key(0), population.everyone)
    for row, client in zip(np.asarray(found), DATA, strict=True):
        y, seen = client["y"], row[: len(client["y"])]
        assert (seen == y)[seen >= 0].all() and (row[len(y) :] == -1).all()
        left = np.count_nonzero(seen < 0)
        assert (0 < left < len(y)) if some else left == 0


def test_examples_that_are_held_out_and_the_others_share_no_place():
    @fg.program(cohort=fg.CLIENTS)
    def both(cohort):
        train, held = fg.HeldOut(0.4).split(cohort)
        return marked(train), marked(held)

    rest, held = both(fg.population(DATA).everyone)
    for a, b, client in zip(np.asarray(rest), np.asarray(held), DATA, strict=True):
        n = len(client["y"])
        assert ((a[:n] >= 0) ^ (b[:n] >= 0)).all()


# ---- names that are not there


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_there_says_why_and_what_to_write(name):
    assert not hasattr(fg, name) and name not in fg.__all__
    with pytest.raises(AttributeError, match=rf"There is no fg\.{name}: .*\. \w") as raised:
        getattr(fg, name)
    assert isinstance(raised.value, fg.FederatedError)
    assert str(raised.value).startswith(__file__)


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"There is no fg\.fedavg\. Did you mean 'fed_avg'\?"):
        fg.fedavg
    with pytest.raises(ImportError):
        exec("from fedgrad import fedavg")
    assert isinstance(fg, types.ModuleType) and not hasattr(fg, "__path_hook__")


def test_the_recipes_in_the_messages_are_right():
    """What is written in their place, computed."""
    clients = [np.abs(c["x"][0]) for c in CLIENTS]

    @fg.program(x=fg.CLIENTS)
    def recipes(x):
        return {
            "any": fg.sum(x > 2) > 0,
            "all": fg.sum(~(x > 0)) == 0,
            "count": fg.sum(1),
            "var": fg.mean(x**2) - fg.mean(x) ** 2,
            "std": jnp.sqrt(fg.mean(x**2) - fg.mean(x) ** 2),
            "prod": jnp.exp(fg.sum(jnp.log(x))),
            "histogram": fg.sum(jnp.histogram(x, jnp.array([0.0, 1.0, 4.0]))[0]),
        }

    x = np.stack(clients)
    found = recipes(x)
    expected = {
        "any": (x > 2).any(0),
        "all": (x > 0).all(0),
        "count": len(x),
        "var": x.var(0),
        "std": x.std(0),
        "prod": x.prod(0),
        "histogram": np.histogram(x, [0.0, 1.0, 4.0])[0],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)


@pytest.mark.promotes("dtype")
def test_the_skeletons_for_contributors_train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from skeletons import algorithm, task, transformation

    made = task.skeleton()
    counted = transformation.counted(algorithm.skeleton(made.loss))
    params = made.init(jax.random.key(0))
    history = fg.fit(counted, made.train, params=params, rounds=20, progress=False).history
    assert history["loss"][-1] < history["loss"][0] / 2 and history["rounds"][-1] == 20
