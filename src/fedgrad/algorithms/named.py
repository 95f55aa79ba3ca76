"""Keywords for local training that all named algorithms share."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.local_training import LocalTraining
from fedgrad.algorithms.objective import OF_THE_LOSS
from fedgrad.algorithms.settings import titled
from fedgrad.core.errors import ArgumentError, known_arguments

# Hints for the error raised when one of these is passed to an algorithm.
BELONGS_TO_LOCAL_TRAINING = {
    field.name: f"It belongs to local training: client=fg.local_training(..., {field.name}=...)."
    for field in fields(LocalTraining)
} | {"client_learning_rate": "It is the client: client=0.1, or client=fg.local_training(0.1, ...)."}

KEYWORDS = ("client_learning_rate", "batch_size", "epochs")  # everything else goes into client=


def named(make: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Decorate `make(loss, client, ...)` so that it also takes the client's options as keywords.

    `batch_size=10` means `client=fg.local_training(batch_size=10)`.
    """
    own = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **given: Any) -> Algorithm:
        work = {name: given.pop(name) for name in KEYWORDS if given.get(name) is not None}
        given = {name: value for name, value in given.items() if name not in KEYWORDS}
        if work:
            if "client" in own.bind_partial(*args, **given).arguments:
                name = next(iter(work))
                raise ArgumentError.here(
                    f"{make.__name__}(client=..., {name}={work[name]!r}): what a client does is "
                    "said twice. Give the keywords alone, or all of it as "
                    "client=fg.local_training(0.1, batch_size=10, ...)."
                )
            rate = [work.pop("client_learning_rate")] if "client_learning_rate" in work else []
            given["client"] = LocalTraining(*rate, **work)
        return make(*args, **given)

    more = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in KEYWORDS]
    made.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *more]
    )
    return titled(known_arguments(BELONGS_TO_LOCAL_TRAINING | OF_THE_LOSS)(made))
