"""A training that is watched: what makes it worse for several rounds is undone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from by_hand import POPULATION, START, as_params, loss
from fedgrad.algorithms.watch import Losses, Watch

KEY = jax.random.key(0)
STEADY = (1.0, 1.1, 0.9, 1.0, 1.1, 0.9)


def seen(losses):
    found = Losses.none()
    for each in losses:
        found = found.plus(jnp.float32(each))
    return found


@pytest.mark.parametrize("offset", [0.0, 1e3, -5.0])
def test_mean_and_variance_also_far_from_zero(offset):
    losses = np.array(STEADY) + offset
    mean, variance = seen(losses).measured()
    assert mean == pytest.approx(losses.mean(), rel=1e-6)
    assert variance == pytest.approx(losses.var(ddof=1), rel=1e-2)


@pytest.mark.parametrize(
    "before, since, worse",
    [
        (STEADY, (1.0, 1.05, 0.9, 1.1), False),
        (STEADY, (0.5, 0.4, 0.3, 0.3), False),
        (STEADY, (1.5, 1.6, 1.4, 1.5), True),
        (STEADY, (1.0, 1.2, 2.0, 4.0), True),  # by and by: these differ, and not by chance
        (STEADY, (3.0, 3.0, 3.0), None),  # of fewer rounds than were asked for
        ((1.0, 1.0), (3.0, 3.0, 3.0, 3.0), False),  # nothing is known of chance
        ((), (3.0, 3.0, 3.0, 3.0), False),
    ],
)
def test_worse_by_more_than_chance_explains(before, since, worse):
    assert Watch(None, seen(before), seen(since)).got_worse(4) is worse


def test_a_loss_that_is_unknown_or_not_finite_tells_nothing():
    found = seen(STEADY)
    assert found.plus(None) is found
    jax.tree.map(np.testing.assert_array_equal, found.plus(jnp.float32(jnp.nan)), found)


def test_what_won_and_got_worse_goes_back_to_where_it_was_with_half_the_rate():
    tuned = fg.self_tuning(fg.fed_avgm(loss, fg.local_training(1e-3, batch_size=10), 1e-3, 0.5))

    def until(round):
        stop = [lambda done, *_: done == round]
        given = {"params": as_params(START), "rounds": 80, "cohort_size": 3, "key": KEY}
        return fg.fit(tuned, POPULATION, callbacks=stop, progress=False, **given).state

    state, before = until(43), until(40)
    assert [*state.parts] == ["alone"]
    before = tuned.between(before, 40, 80)  # where it was asked last, all being well
    jax.tree.map(np.testing.assert_array_equal, state.watch.safe, before.parts["alone"])
    ((name, rates),) = state.rates.items()
    for since, undone in ((STEADY, False), (np.array(STEADY) + 1, True)):
        watch = Watch(state.watch.safe, seen(STEADY), seen(since))
        told = tuned.between(type(state)(state.parts, state.rates, watch), 44, 80)
        expected = state.watch.safe if undone else state.parts["alone"]
        jax.tree.map(np.testing.assert_array_equal, told.parts["alone"], expected)
        half = 0.5 if undone else 1.0
        got = told.rates[name]
        assert float(got["server.learning_rate"]) == half * float(rates["server.learning_rate"])
        assert float(got["client.learning_rate"]) == float(rates["client.learning_rate"])
        # It is asked anew: of the same losses as before, or of those that were just good.
        assert told.watch.since.rounds == 0 and told.watch.before.rounds == len(STEADY)
