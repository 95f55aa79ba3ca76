"""A training that is watched: what makes it worse for several rounds is undone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from by_hand import POPULATION, START, as_params, loss
from fedgrad.tuning.divergence import Watch

KEY = jax.random.key(0)
STEADY = 2 * (1.0, 1.1, 0.9, 1.0, 1.1, 0.9)


def watched(before, since, began=2.0, safe=None):
    """Of a training that told these losses."""
    found = Watch.begin(safe or {})
    for losses in (before, since):
        found = found.moved(found.safe)
        for each in losses:
            found = found.plus(jnp.float32(each))
    return replace(found, began=jnp.float32(began))


@pytest.mark.parametrize("offset", [0.0, 1e3, -5.0])
def test_means_and_jumps_also_far_from_zero(offset):
    losses = np.array(STEADY) + offset
    found = watched(losses, losses[:5]).moved({})
    assert found.before.mean == pytest.approx(losses[:5].mean(), rel=1e-6)
    jumps = [*np.diff(losses), *np.diff(losses[:5])]
    assert float(found.jumps) == pytest.approx(np.sum(np.abs(jumps)), rel=1e-2)
    assert float(found.pairs) == len(jumps)


WILD = (3.0, 1.0, 6.0, 2.0, 0.5, 8.0, 3.0, 5.0)


@pytest.mark.parametrize(
    "before, since, worse",
    [
        (STEADY, (1.0, 1.05, 0.9, 1.1), False),
        (STEADY, (0.5, 0.4, 0.3, 0.3), False),
        (STEADY, (1.5, 1.6, 1.4, 1.5), True),
        (STEADY, (1.0, 1.2, 2.0, 4.0), True),  # by and by: these differ, and not by chance
        # A round that is lost tells nothing, more of them than others tell enough.
        (STEADY, (1.0, np.nan, np.inf, 1.0), False),
        (STEADY, (1.0, np.nan, np.inf, np.nan), True),
        ((np.nan, *STEADY, np.inf), (1.5, 1.6, np.nan, 1.4, 1.5), True),
        (STEADY, (3.0, 3.0), False),  # nothing is known of chance
        ((), (3.0, 3.0, 3.0, 3.0), False),
        # They do not differ at all, so every rise is no chance; it matters if much is lost by it.
        ((1.0, 1.0, 1.0), (1.05, 1.05, 1.05), False),
        ((1.0, 1.0, 1.0), (1.2, 1.2, 1.2), True),
        # Three that happen to be alike know little of chance.
        ((1.0, 1.02, 0.98), (1.2, 1.2, 1.2), False),
        (7 * (1.0, 1.02, 0.98), (1.2, 1.2, 1.2), True),
        # That losses fell is no reason to take a rise for chance.
        (np.linspace(2.0, 1.0, 21), (1.9, 1.9, 1.9), True),
        (WILD, (5.0, 6.0, 4.0, 5.0), False),
    ],
)
@pytest.mark.parametrize("shift", [0.0, -7.0])
def test_worse_by_more_than_chance_explains_and_than_nobody_would_notice(
    before, since, worse, shift
):
    before, since = (np.array(losses) + shift for losses in (before, since))
    assert watched(before, since, 2.0 + shift).got_worse() is worse


def test_a_few_rounds_that_happen_to_be_alike_do_not_make_all_others_look_bad():
    """What is known of chance is of all rounds, not only of the last ones."""
    calm, rise = 2 * (2.0, 2.1, 1.9, 2.0), (4.0, 3.0, 5.0, 4.0)
    assert watched(calm, rise).got_worse()
    known = watched(3 * WILD, calm).moved({})
    for each in rise:
        known = known.plus(jnp.float32(each))
    assert not known.got_worse()


def test_where_nothing_was_gained_every_rise_counts_that_is_no_chance():
    for began in (1.0, 0.5):
        assert watched((1.0, 1.0, 1.0), (1.01, 1.01, 1.01), began).got_worse()


@pytest.mark.parametrize("loss, worse", [(1.9, False), (2.0, False), (3.0, True)])
def test_of_other_examples_only_what_loses_all_that_was_gained_is_worse(loss, worse):
    """A model knows those that it trained on, and not those that judged it."""
    known = watched((), STEADY).of_other_examples({})
    for _ in range(4):
        known = known.plus(jnp.float32(loss))
    assert known.got_worse() is worse


def test_one_enormous_loss_does_not_hide_the_next():
    for spike in (1e3, 1e20):
        known = watched((), (*STEADY, spike, *STEADY)).moved({})
        for each in 8 * (100.0,):
            known = known.plus(jnp.float32(each))
        assert known.got_worse()


def test_rates_that_are_not_the_reason_are_restored():
    """Losses that rise whatever the rates are: it goes back once, and then goes on."""
    watch, now, pace, paces = watched((), STEADY, safe={"a": 0}).moved({"a": 0}), 0, 1.0, []
    for ask in range(1, 7):
        for i in range(4):
            watch, now = watch.plus(jnp.float32(1.0 + 0.5 * ask + 0.01 * (i % 2))), now + 1
        state, watch, times = watch.asked({"a": now}, 4 * ask, 80)
        now, pace = state["a"], pace * times
        paces.append(pace)
    assert min(paces) == 0.5 and paces.count(1.0) >= 3 and now >= 8


def test_it_is_asked_in_time_and_of_enough_rounds():
    worse = watched(STEADY, (3.0, 3.0, 3.0, 3.0), safe={"a": "safe"})
    assert worse.asked({"a": "now"}, 9, 80) == ({"a": "now"}, worse, 1.0)  # every four rounds
    few = watched(STEADY, (3.0, 3.0, 3.0), safe={"a": "safe"})
    assert few.asked({"a": "now"}, 8, 80) == ({"a": "now"}, few, 1.0)
    state, known, times = worse.asked({"a": "now"}, 8, 80)
    assert state == {"a": "safe"} and times == 0.5 and known.since.rounds == 0
    assert known.before is worse.before and known.safe == {"a": "safe"}
    well = watched(STEADY, STEADY[:4], safe={"a": "safe"})
    state, known, times = well.asked({"a": "now"}, 8, 80)
    assert state == known.safe == {"a": "now"} and times == 1.0 and known.before is well.since


def test_a_loss_that_is_unknown_tells_nothing():
    watch = Watch.begin({})
    assert watch.plus(None) is watch
    assert watch.plus(jnp.float32(3.0)).plus(jnp.float32(1.0)).began == 3.0


def test_what_won_and_got_worse_goes_back_to_where_it_was_with_half_the_rate():
    tuned = fg.self_tuning(fg.fed_avgm(loss, fg.local_training(1e-3, batch_size=10), 1e-3, 0.5))

    def until(round):
        stop = [lambda done, *_: done == round]
        given = {"params": as_params(START), "rounds": 80, "cohort_size": 3, "key": KEY}
        return fg.fit(tuned, POPULATION, callbacks=stop, progress=False, **given).state

    state, before = until(43), until(40)
    assert [*state.parts] == ["alone"]
    before = tuned.before_round(before, 40, 80)  # where it was asked last, all being well
    jax.tree.map(np.testing.assert_array_equal, state.watch.safe, before.parts)
    ((name, rates),) = state.rates.items()
    for since, undone in ((STEADY, False), (np.array(STEADY) + 1, True)):
        told = watched(STEADY, since, safe=state.watch.safe)
        watch = replace(told, began=state.watch.began)
        told = tuned.before_round(replace(state, watch=watch), 44, 80)
        expected = state.watch.safe if undone else state.parts
        jax.tree.map(np.testing.assert_array_equal, told.parts, expected)
        half = 0.5 if undone else 1.0
        got = told.rates[name]
        assert float(got["server.learning_rate"]) == half * float(rates["server.learning_rate"])
        assert float(got["client.learning_rate"]) == float(rates["client.learning_rate"])
        # It is asked anew: of the same losses as before, or of those that were just good.
        assert told.watch.since.rounds == 0 and told.watch.before.rounds == len(STEADY)
