"""What one sees while it trains: a live line in a terminal, a plain one now and then elsewhere."""

import sys
import time
from typing import Any, Protocol

import jax
import numpy as np

from fedgrad.algorithms.metrics import Metrics

REFRESH_SECONDS = 0.1
PLAIN_SECONDS = 30.0
SHOWN = 4  # hyperparameters, at most


class Display(Protocol):
    """Shows how far training is."""

    def show(self, round: int, metrics: Metrics) -> None:
        """A round is over."""

    def close(self) -> None:
        """Training is over."""


class Silent:
    """Shows nothing."""

    def show(self, round: int, metrics: Metrics) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def display(progress: Any, first: int, rounds: int, clients: int) -> Display:
    """The display for this output. Training starts after round `first` and has `clients` a round.

    It goes to the error stream, so that what a script prints stays what it prints.
    """
    if progress is False or jax.process_index() > 0:  # one of several processes is enough
        return Silent()
    from rich.console import Console  # loaded when it is needed: it takes a while

    console = progress if isinstance(progress, Console) else Console(stderr=True)
    pace = Pace(first, rounds, clients)
    live = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
    return Live(console, pace) if live else Plain(pace)


class Pace:
    """How fast it goes. The first round is left out: it compiles."""

    def __init__(self, first: int, rounds: int, clients: int) -> None:
        self.rounds, self.clients, self.first = rounds, clients, first
        self.start, self.began = first, time.perf_counter()
        self.shown = self.began

    def due(self, round: int, seconds: float) -> bool:
        """Whether something should be shown now."""
        now = time.perf_counter()
        if round == self.first + 1:
            self.start, self.began = round, now
        if now - self.shown < seconds:
            return False
        self.shown = now
        return True

    def describe(self, round: int) -> str:
        """Clients a second, and the time that is left."""
        seconds = self.shown - self.began
        if round <= self.start or seconds <= 0:
            return ""
        rate = (round - self.start) / seconds
        left = round_up((self.rounds - round) / rate)
        return f"{rate * self.clients:,.0f} clients/s · {left} left"


def round_up(seconds: float) -> str:
    """Seconds as 0:05 or 1:20:00."""
    minutes, rest = divmod(int(seconds + 0.999), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Live:
    """A line that changes; its own thread draws it, a few times a second."""

    def __init__(self, console: Any, pace: Pace) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.pace = pace
        self.bar = Progress(
            TextColumn("round {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[values]}", markup=False),
            TextColumn("{task.fields[pace]}", style="dim", markup=False),
            console=console,
            refresh_per_second=5,
            # What goes into a file is not to be mixed with what goes to the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self.task = self.bar.add_task(
            "", total=pace.rounds, completed=pace.start, values="compiling", pace=""
        )
        self.last: tuple[int, Metrics] | None = None
        self.bar.start()

    def show(self, round: int, metrics: Metrics) -> None:
        """Remember; show it if it is time to."""
        self.last = round, metrics
        if self.pace.due(round, REFRESH_SECONDS):
            self._update(round, metrics)

    def close(self) -> None:
        """Leave the last line where it is."""
        if self.last is not None:
            self.pace.due(self.last[0], 0)
            self._update(*self.last)
        self.bar.stop()

    def _update(self, round: int, metrics: Metrics) -> None:
        pace = self.pace.describe(round)
        self.bar.update(self.task, completed=round, values=values(metrics), pace=pace)


class Plain:
    """A line of text every half minute, and one at the end."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.last: tuple[int, Metrics] | None = None

    def show(self, round: int, metrics: Metrics) -> None:
        """Remember; print it if it is time to."""
        self.last = round, metrics
        if self.pace.due(round, PLAIN_SECONDS):
            self._print(round, metrics)
            self.last = None

    def close(self) -> None:
        """The last line."""
        if self.last is not None:
            self.pace.due(self.last[0], 0)
            self._print(*self.last)

    def _print(self, round: int, metrics: Metrics) -> None:
        parts = [f"round {round:,}/{self.pace.rounds:,}", values(metrics)]
        parts.append(self.pace.describe(round))
        print(" · ".join(filter(None, parts)), file=sys.stderr, flush=True)


def values(metrics: Metrics) -> str:
    """The loss and the hyperparameters; of trials side by side, from the least to the most."""
    numbers = ({} if metrics.loss is None else {"loss": metrics.loss}) | dict(metrics.hyper)
    most = SHOWN + ("loss" in numbers)
    shown = [f"{name} {_number(value)}" for name, value in list(numbers.items())[:most]]
    if len(numbers) > most:
        shown.append(f"and {len(numbers) - most} more")
    return " · ".join(shown)


def _number(value: Any) -> str:
    array = np.asarray(value, float).ravel()
    if array.size == 1:
        return f"{array[0]:.4g}"
    finite = array[np.isfinite(array)]
    if not finite.size:
        return "not finite"
    return f"{finite.min():.4g} to {finite.max():.4g}"
