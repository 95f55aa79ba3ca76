"""Parametrizations of learned hyperparameters: as they are, or so that a step stays in range."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.core.errors import ArgumentError, known_arguments, public
from fedgrad.core.primitives import common
from fedgrad.core.types import Hyper

Bounds = tuple[float, float]

# Keyed by a part of the dotted name (a layer may follow it); all others are unbounded.
DEFAULT_BOUNDS: dict[str, Bounds] = {
    "adaptation_rate": (0.0, math.inf),
    "adaptivity": (1e-8, math.inf),
    "b1": (0.0, 0.999),
    "b2": (0.0, 0.9999),
    "hyper_learning_rate": (0.0, math.inf),
    "learning_rate": (0.0, math.inf),
    "momentum": (0.0, 0.999),
    "proximal_weight": (0.0, math.inf),
}
# These are searched by magnitude: a step size that is right at 1 is wrong at 0.01.
MAGNITUDES = ("adaptation_rate", "adaptivity", "factor", "hyper_learning_rate", "learning_rate")
EDGE = 1e-6  # the least distance of a logit from its bounds, relative to the range


@public
@dataclass(frozen=True)
class Form:
    """The form in which a hyperparameter is learned, and its bounds: `linear`, `log` or `logit`."""

    kind: str
    low: Any = None  # None: the default for the name
    high: Any = None
    name: str = ""  # of the hyperparameter, once it is known

    def value(self, raw: Any) -> Any:
        """Return the value that the algorithm uses."""
        return VALUES[self.kind](raw, self.bounds)

    def raw(self, value: Any) -> Any:
        """Return the number that is learned, projected into the bounds."""
        value = jnp.asarray(value, common(float, value))
        known = not isinstance(value, jax.core.Tracer)
        if self.kind == "log" and known and not jnp.all(value > 0):
            raise ArgumentError.here(
                f"{self.name!r} starts at {value}, which has no logarithm. Start above 0, or learn "
                "it as it is: fg.linear()."
            )
        if known and not jnp.all((value >= self.low) & (value <= self.high)):
            raise ArgumentError.here(
                f"{self.name!r} starts at {value}, outside of its bounds, {self.low} to "
                f"{self.high}. Start inside, algorithm.starting({{{self.name!r}: ...}}), or widen "
                f"them: fg.{self.kind}(low, high)."
            )
        return self.project(RAW[self.kind](value, self.bounds))

    def project(self, raw: Any) -> Any:
        """Return the nearest number whose value is inside the bounds."""
        low, high = (RAW[self.kind](jnp.asarray(b, raw.dtype), self.bounds) for b in self.bounds)
        return jnp.clip(raw, low, high)

    @property
    def bounds(self) -> Bounds:
        """The low and high bounds of the value."""
        return self.low, self.high

    @property
    def words(self) -> str:
        """The form as it is written: `log(0.001, 10)`."""
        return f"{self.kind}({self.low}, {self.high})"


@known_arguments()
def linear(low: float | None = None, high: float | None = None) -> Form:
    """Learn a hyperparameter as it is, like the paper.

    Args:
        low: The lower bound; by default it depends on the name: a learning rate is not negative.
        high: The upper bound; by default it depends on the name: a momentum is below 1.

    Returns:
        A form for `fg.self_tuning(..., learn=)`. A step beyond a bound ends at the bound.

    Example:

        fg.self_tuning(algorithm, learn={"server.momentum": fg.linear(0, 0.99)})
    """
    return Form("linear", low, high)


@known_arguments()
def log(low: float | None = None, high: float | None = None) -> Form:
    """Learn the logarithm of a hyperparameter: steps are multiplicative, and it stays positive.

    Args:
        low: The lower bound; the default depends on the name.
        high: The upper bound; the default depends on the name.

    Returns:
        A form for `fg.self_tuning(..., learn=)`.

    Example:

        fg.self_tuning(algorithm, learn={"server.learning_rate": fg.log(1e-3, 10)})
    """
    return Form("log", low, high)


@known_arguments()
def logit(low: float | None = None, high: float | None = None) -> Form:
    """Learn the logit of a hyperparameter's position between two bounds, so that it stays there.

    Args:
        low: The lower bound, finite; the default depends on the name.
        high: The upper bound, finite; the default depends on the name.

    Returns:
        A form for `fg.self_tuning(..., learn=)`.

    Example:

        fg.self_tuning(algorithm, learn={"server.momentum": fg.logit(0, 1)})
    """
    return Form("logit", low, high)


def usual(low: float | None = None, high: float | None = None) -> Form:
    """Return the default form for a name: the logarithm of rates, everything else as it is."""
    return Form("usual", low, high)


FORMS = {"linear": linear, "log": log, "logit": logit}  # by the name on the command line


def _logit(value: Any, bounds: Bounds) -> Any:
    low, high = bounds
    part = jnp.clip((value - low) / (high - low), EDGE, 1 - EDGE)
    return jnp.log(part) - jnp.log1p(-part)


def _positive(value: Any) -> Any:
    """Clip away from 0 and infinity, whose logarithms could not be undone."""
    return jnp.clip(value, jnp.finfo(value.dtype).tiny, jnp.finfo(value.dtype).max)


# From the number that is learned to the value that is used, and back; both are increasing.
VALUES: dict[str, Callable[[Any, Bounds], Any]] = {
    "linear": lambda raw, bounds: raw,
    "log": lambda raw, bounds: jnp.exp(raw),
    "logit": lambda raw, bounds: bounds[0] + (bounds[1] - bounds[0]) * jax.nn.sigmoid(raw),
}
RAW: dict[str, Callable[[Any, Bounds], Any]] = {
    "linear": lambda value, bounds: value,
    "log": lambda value, bounds: jnp.log(_positive(value)),
    "logit": _logit,
}


def learned(
    hyper: Hyper, learn: str | Iterable[str] | Mapping[str, Form], form: Form = Form("linear")
) -> dict[str, Form]:
    """Return the forms of the learned hyperparameters by dotted name, with bounds, checked. `form`
    is the form of bare names."""
    if not isinstance(learn, Mapping):
        learn = dict.fromkeys([learn] if isinstance(learn, str) else learn, form)
    forms: dict[str, Form] = {}
    for name in sorted(learn, key=lambda name: name.count(".")):  # more specific names win
        forms |= dict.fromkeys(names_of.select(hyper, name), learn[name])
    return {name: _learned(name, forms[name]) for name in names_of.select(hyper, learn)}


def _learned(name: str, form: Form) -> Form:
    if not isinstance(form, Form):
        raise ArgumentError.here(
            f"learn={{{name!r}: {form!r}}}: give a form, such as fg.log(1e-3, 10).",
            str(form),
            FORMS,
        )
    parts = [p for p in name.split(".") if p in DEFAULT_BOUNDS]
    low, high = DEFAULT_BOUNDS[parts[0]] if parts else (-math.inf, math.inf)
    if name.endswith(".factor"):  # the factor of any schedule
        low, high = 0.0, math.inf
    low, high = low if form.low is None else form.low, high if form.high is None else form.high
    if not low < high:
        raise ArgumentError.here(f"bounds of {name!r}: {low} is not below {high}.")
    kind = form.kind
    if kind == "usual":
        kind = "log" if low >= 0 and not {*MAGNITUDES}.isdisjoint(name.split(".")) else "linear"
    if kind == "log" and low < 0:
        raise ArgumentError.here(
            f"{name!r} cannot be learned by its logarithm: it may be as low as {low}. Write "
            "fg.log(low, high) with low >= 0, or fg.linear()."
        )
    if kind == "logit" and not (math.isfinite(low) and math.isfinite(high)):
        raise ArgumentError.here(
            f"{name!r} cannot be learned by its logit without two finite bounds, it has ({low}, "
            f"{high}). Write fg.logit(low, high)."
        )
    return Form(kind, low, high, name)
