"""Claims that training needs no tuning, which these results can refute task by task."""

from fedgrad_experiments.no_tuning.goals import BYTES, ENOUGH, NEEDS, STAYS, WITHIN, goals, means
from fedgrad_experiments.no_tuning.methods import LONGER, METHODS
from fedgrad_experiments.no_tuning.outcome import rivals
from fedgrad_experiments.results import Claim, Results

# By the name of a goal: the claim, and a description of its numbers.
STATEMENTS = {
    "worst tenth": (
        f"The worst tenth of fed_auto is within {100 * WITHIN:g} point of the best of "
        f"{ENOUGH['fedavgm']} fixed FedAvgM and {ENOUGH['fedadam']} fixed FedAdam trainings, "
        "averaged models included.",
        "Worst tenth of fed_auto against the best fixed, in %",
    ),
    "median": (
        "The median of fed_auto is above the best of them.",
        "Median of fed_auto against the best fixed, in %",
    ),
    "blind worst tenth": (
        "So is that of fed_auto as it was frozen before anybody had looked at a task (but for "
        "digits and synthetic).",
        "Worst tenth of the frozen fed_auto against the best fixed, in %",
    ),
    "blind median": (
        "And its median is above the best of them.",
        "Median of the frozen fed_auto against the best fixed, in %",
    ),
    "bytes": (
        f"fed_auto takes at most {BYTES:g} times the bytes of one fixed training.",
        "Bytes of a fixed training",
    ),
    "finite": ("No training of fed_auto ends with a model that is not finite.", "Not finite"),
    "good start": (
        f"self_tuning from the best fixed start loses at most {100 * STAYS:g} points.",
        "self_tuning against fixed from the same start, the better of its two models, means in %",
    ),
}
AS_MANY_ROUNDS = (
    "On the mean over data sets the median of fed_auto is ahead of every other method that trains "
    "for as many rounds."
)
AS_MANY_BYTES = (
    "It is also ahead of what sends half as much in a round, if that trains for twice the rounds: "
    "at as many bytes."
)
SMALL = "Too small to decide"


def claims(results: Results) -> list[Claim]:
    """Return one claim of each kind, with its results on each task."""
    each = [_of_tasks(results, name) for name in STATEMENTS]
    return [*each, _ahead(results, AS_MANY_ROUNDS), _ahead(results, AS_MANY_BYTES, longer=True)]


def _of_tasks(results: Results, name: str) -> Claim:
    statement, what = STATEMENTS[name]
    found = {task: goals(results, task).get(name) for task in results.facts["tasks"]}
    known = {task: goal for task, goal in found.items() if goal is not None}
    verdicts = [goal.met for goal in known.values()]
    holds = False if False in verdicts else (True if verdicts and None not in verdicts else None)
    parts = [
        f"{task} {goal.words}{' (NOT MET)' * (goal.met is False)}" for task, goal in known.items()
    ]
    met = f"Met on {sum(v is True for v in verdicts)} of {len(verdicts)} tasks. "
    if None in verdicts:
        needed = ", ".join(f"{ENOUGH[name]} of {METHODS[name].title}" for name in NEEDS[name])
        met = f"{SMALL} on {verdicts.count(None)} of {len(verdicts)} tasks: it takes {needed}. "
    evidence = f"{met}{what}: {'; '.join(parts) or 'no task is done'}."
    return Claim(statement, holds, evidence, too_small=holds is None and None in verdicts)


def _ahead(results: Results, statement: str, longer: bool = False) -> Claim:
    found = means(results)
    theirs = [one for name, one in rivals(found).items() if (name in LONGER) is longer]
    if "auto" not in found or not theirs:
        return Claim(statement, None, "There is no task on which all methods were run.")
    ours, few = found["auto"], found["auto"].trainings < ENOUGH["auto"]
    others = sorted(theirs, key=lambda one: -one.median)
    listed = "; ".join(f"{one.title} {100 * one.median:.1f}" for one in others)
    small = f"{SMALL}: {ours.trainings} seeds. " if few else ""
    return Claim(
        statement,
        None if few else all(ours.median > one.median for one in others),
        f"{small}Mean of medians, in %: {ours.title} {100 * ours.median:.1f}; {listed}.",
        too_small=few,
    )
