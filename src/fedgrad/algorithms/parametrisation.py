"""How a learned hyperparameter is written: as it is, or so that a step cannot leave its range."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.errors import ArgumentError, nearest

Bounds = tuple[float, float]

# By the part of a hyperparameter's name that is here (what follows it is a layer); others are
# unbounded.
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
EDGE = 1e-6  # how near to its bounds, as a part of the range, a logit can be


@dataclass(frozen=True)
class Form:
    """From the number that is learned to the value that is used, and back; both increase."""

    value: Callable[[Any, Bounds], Any]
    raw: Callable[[Any, Bounds], Any]


def _logit(value: Any, bounds: Bounds) -> Any:
    low, high = bounds
    part = jnp.clip((value - low) / (high - low), EDGE, 1 - EDGE)
    return jnp.log(part) - jnp.log1p(-part)


def _positive(value: Any) -> Any:
    """Neither 0 nor infinite, from where no logarithm comes back."""
    return jnp.clip(value, jnp.finfo(value.dtype).tiny, jnp.finfo(value.dtype).max)


FORMS: dict[str, Form] = {
    "identity": Form(lambda raw, bounds: raw, lambda value, bounds: value),
    "log": Form(lambda raw, bounds: jnp.exp(raw), lambda value, bounds: jnp.log(_positive(value))),
    "logit": Form(
        lambda raw, bounds: bounds[0] + (bounds[1] - bounds[0]) * jax.nn.sigmoid(raw), _logit
    ),
}


@dataclass(frozen=True)
class Learned:
    """One hyperparameter that is learned."""

    name: str
    form: Form
    bounds: Bounds

    def value(self, raw: Any) -> Any:
        """The value that the algorithm uses."""
        return self.form.value(raw, self.bounds)

    def raw(self, value: Any) -> Any:
        """The number that is learned, inside of the bounds."""
        value = jnp.asarray(value, jnp.result_type(float, value))
        known = not isinstance(value, jax.core.Tracer)
        if self.form is FORMS["log"] and known and not jnp.all(value > 0):
            raise ArgumentError.here(
                f"{self.name!r} starts at {value}, which has no logarithm. Start above 0, or learn "
                "it in another parametrisation."
            )
        return self.project(self.form.raw(value, self.bounds))

    def project(self, raw: Any) -> Any:
        """The nearest number that gives a value inside of the bounds."""
        low, high = (self.form.raw(jnp.asarray(b, raw.dtype), self.bounds) for b in self.bounds)
        return jnp.clip(raw, low, high)


def learned(
    names: list[str], forms: str | Mapping[str, str], bounds: Mapping[str, Bounds]
) -> dict[str, Learned]:
    """What is learned, by name, with its form and bounds checked."""
    for what, given in (("parametrisation", forms), ("bounds", bounds)):
        for name in given if isinstance(given, Mapping) else ():
            if name not in names:
                raise ArgumentError.here(
                    f"{what}= names {name!r}, which is not learned." + nearest(name, names)
                )
    return {name: _learned(name, forms, bounds) for name in names}


def _learned(name: str, forms: str | Mapping[str, str], bounds: Mapping[str, Bounds]) -> Learned:
    form = forms if isinstance(forms, str) else forms.get(name, "identity")
    if form not in FORMS:
        raise ArgumentError.here(
            f"There is no parametrisation {form!r}." + nearest(form, list(FORMS))
        )
    parts = [p for p in name.split(".") if p in DEFAULT_BOUNDS]
    low, high = bounds.get(name, DEFAULT_BOUNDS[parts[0]] if parts else (-math.inf, math.inf))
    if not low < high:
        raise ArgumentError.here(f"bounds of {name!r}: {low} is not below {high}.")
    if form == "log" and low < 0:
        raise ArgumentError.here(
            f"{name!r} cannot be learned by its logarithm: it may be as low as {low}. Give "
            f"bounds={{{name!r}: (low, high)}} with low >= 0, or another parametrisation."
        )
    if form == "logit" and not (math.isfinite(low) and math.isfinite(high)):
        raise ArgumentError.here(
            f"{name!r} cannot be learned by its logit without two finite bounds, it has ({low}, "
            f"{high}). Give bounds={{{name!r}: (low, high)}}."
        )
    return Learned(name, FORMS[form], (low, high))
