"""Checks the paper's claims about learned client weighting against these results."""

import numpy as np

from fedgrad_experiments.client_weighting.training import SCHEDULES
from fedgrad_experiments.results import Claim, Results

EARLY = 0.1  # fraction of all rounds
MUCH = 0.1  # difference in loss
CLOSE = 0.02  # relative difference in loss that counts as equal


def claims(results: Results) -> list[Claim]:
    """Return every claim with its numbers. Losses are means over seeds unless each seed is
    judged."""
    return [
        _starts_better(results),
        _ends_better(results),
        _tracks_the_envelope(results),
        _beats_uniform_early(results),
        _beats_both_at_the_end(results),
        _rises_fast(results),
        _parallel_matches_serial(results),
        Claim(
            "On the paper's five tasks, learned weighting makes no significant difference.",
            None,
            "Not on this task: `--task emnist`, and each of the others, tests it there.",
        ),
    ]


def _starts_better(results: Results) -> Claim:
    at = _early(results)
    by_examples, uniform = (_loss(results, f"fixed {q}")[:, at] for q in (1, 0))
    gap = uniform - by_examples
    return Claim(
        "Weighting by examples (q = 1) starts much better than uniform weighting (q = 0).",
        bool(gap.mean() >= MUCH),
        f"Round {_round(results, at)}: {by_examples.mean():.3f} against {uniform.mean():.3f}; "
        f"better in {_of(gap > 0)}. Much means by {MUCH} in the mean.",
    )


def _ends_better(results: Results) -> Claim:
    by_examples, uniform = (_loss(results, f"fixed {q}")[:, -1] for q in (1, 0))
    return Claim(
        "Uniform weighting (q = 0) ends better than weighting by examples (q = 1).",
        bool(uniform.mean() < by_examples.mean()),
        f"Round {_round(results, -1)}: {uniform.mean():.3f} against {by_examples.mean():.3f}; "
        f"better in {_of(uniform < by_examples)}.",
    )


def _tracks_the_envelope(results: Results) -> Claim:
    envelope = np.minimum(_loss(results, "fixed 1"), _loss(results, "fixed 0"))
    parts, holds = [], True
    for schedule in SCHEDULES:
        learned = _loss(results, f"{schedule} from 1")
        excess = (learned - envelope).mean(0) / envelope.mean(0)
        worst = int(excess.argmax())
        holds &= bool(excess[worst] <= CLOSE)
        at_the_end = learned[:, -1] / envelope[:, -1] - 1
        parts.append(
            f"{schedule} at worst {100 * excess[worst]:+.1f} % (round {_round(results, worst)}), "
            f"at the end {100 * excess[-1]:+.1f} %; at the end of single seeds up to "
            f"{100 * at_the_end.max():+.0f} %, close in {_of(at_the_end <= CLOSE)}"
        )
    return Claim(
        "q learned from 1 tracks or beats the lower envelope of q = 1 and q = 0.",
        holds,
        f"Loss relative to the envelope of each seed, in the mean over seeds: {'; '.join(parts)}. "
        f"Tracks means at most {100 * CLOSE:+.0f} % in every evaluation, in the mean.",
    )


def _beats_uniform_early(results: Results) -> Claim:
    at = _early(results)
    uniform = _loss(results, "fixed 0")[:, at]
    learned = {s: _loss(results, f"{s} from 0")[:, at] for s in SCHEDULES}
    return Claim(
        "q learned from 0 beats uniform weighting early.",
        all(x.mean() < uniform.mean() for x in learned.values()),
        f"Round {_round(results, at)}: "
        + "; ".join(f"{s} {x.mean():.3f}, in {_of(x < uniform)}" for s, x in learned.items())
        + f"; uniform {uniform.mean():.3f}.",
    )


def _beats_both_at_the_end(results: Results) -> Claim:
    fixed = np.minimum(_loss(results, "fixed 1"), _loss(results, "fixed 0"))[:, -1]
    best = min(_loss(results, f"fixed {q}")[:, -1].mean() for q in (1, 0))
    learned = {s: _loss(results, f"{s} from 0")[:, -1] for s in SCHEDULES}
    return Claim(
        "q learned from 0 beats both fixed weightings at the end.",
        all(x.mean() < best for x in learned.values()),
        f"Round {_round(results, -1)}: "
        + "; ".join(f"{s} {x.mean():.3f}, in {_of(x < fixed)}" for s, x in learned.items())
        + f"; the better fixed one {best:.3f}.",
    )


def _rises_fast(results: Results) -> Claim:
    rounds = max(2, round(EARLY * results.settings["rounds"]))
    most = results.settings["hyper_learning_rate"] * (rounds - 1)
    learned, exponent = results.facts["learned"], results.arrays["exponent"]
    risen = {s: exponent[learned.index(f"{s} from 0"), :, rounds - 1] for s in SCHEDULES}
    return Claim(
        "q rises fast from 0.",
        all(x.mean() >= most / 2 for x in risen.values()),
        f"Round {rounds}: "
        + "; ".join(
            f"{s} {x.mean():.3f} ({x.min():.3f} to {x.max():.3f})" for s, x in risen.items()
        )
        + f". Adam's steps allow {most:.2f}; fast means at least half of that.",
    )


def _parallel_matches_serial(results: Results) -> Claim:
    parts, holds = [], True
    for start in ("from 1", "from 0"):
        serial, parallel = (_loss(results, f"{s} {start}")[:, -1].mean() for s in SCHEDULES)
        holds &= bool(abs(parallel - serial) <= CLOSE * serial)
        parts.append(f"{start}: {parallel:.3f} against {serial:.3f}")
    return Claim(
        "The parallel schedule, at half the rounds of communication, ends where the serial does.",
        holds,
        f"Parallel and serial {'; '.join(parts)}. The same means within {100 * CLOSE:.0f} %.",
    )


def _loss(results: Results, curve: str) -> np.ndarray:
    """Return the losses of a curve: seeds x evaluations."""
    return results.arrays["loss"][results.facts["curves"].index(curve)]


def _early(results: Results) -> int:
    rounds = results.arrays["rounds"]
    return int(np.abs(rounds - EARLY * rounds[-1]).argmin())


def _round(results: Results, at: int) -> int:
    return int(results.arrays["rounds"][at])


def _of(holds: np.ndarray) -> str:
    return f"{int(holds.sum())} of {len(holds)} seeds"
