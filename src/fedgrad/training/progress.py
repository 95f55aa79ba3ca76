"""What one sees while it trains: a live line in a terminal, a plain one now and then elsewhere."""

import sys
import time
from typing import Any, Protocol

import jax
import numpy as np

from fedgrad.algorithms.metrics import Metrics

SHOWN = 4  # hyperparameters, at most


class Line(Protocol):
    """Where the line of a display is drawn, and how often."""

    seconds: float

    def draw(self, round: int, values: str, pace: str) -> None:
        """Show this."""

    def close(self) -> None:
        """Training is over."""


class Display:
    """Shows how far training is: a line that is drawn now and then, and at the end.

    Training starts after round `first` and has `clients` a round. Without a line it is silent.
    """

    def __init__(self, line: Line | None = None, first: int = 0, clients: int = 0, rounds: int = 0):
        self.line, self.clients, self.rounds = line, clients, rounds
        self.first = self.start = self.round = first
        self.began = self.drawn = time.perf_counter()
        self.last: tuple[int, Metrics] | None = None

    def show(self, round: int, metrics: Metrics) -> None:
        """A round is over: remember it, and draw it if it is time to."""
        self.round, self.last, now = round, (round, metrics), time.perf_counter()
        if round == self.first + 1:  # it has compiled, which says nothing about the others
            self.start, self.began = round, now
        if self.line is not None and now - self.drawn >= self.line.seconds:
            self._draw(self.line)

    def evaluating(self, done: int, there: int) -> None:
        """So many of the clients were asked how good the model is: draw it if it is time to."""
        now = time.perf_counter()
        if self.line is not None and now - self.drawn >= self.line.seconds:
            self.drawn = now
            self.line.draw(self.round, f"evaluating, {done:,} of {there:,} clients", "")

    def close(self) -> None:
        """Training is over: leave the last line where it is."""
        if self.line is not None:
            self._draw(self.line)
            self.line.close()

    def _draw(self, line: Line) -> None:
        if self.last is not None:
            round, metrics = self.last
            self.drawn, self.last = time.perf_counter(), None
            line.draw(round, values(metrics), self._pace(round))

    def _pace(self, round: int) -> str:
        """Clients a second, and the time that is left."""
        seconds = self.drawn - self.began
        if round <= self.start or seconds <= 0:
            return ""
        rate = (round - self.start) / seconds
        left = round_up((self.rounds - round) / rate)
        return f"{rate * self.clients:,.0f} clients/s · {left} left"


def display(progress: Any, first: int, rounds: int, clients: int) -> Display:
    """The display for this output.

    It goes to the error stream, so that what a script prints stays what it prints.
    """
    if progress is False or jax.process_index() > 0:  # one of several processes is enough
        return Display()
    from rich.console import Console  # loaded when it is needed: it takes a while

    console = progress if isinstance(progress, Console) else Console(stderr=True)
    live = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
    line = Live(console, first, rounds) if live else Plain(rounds)
    return Display(line, first, clients, rounds)


class Live:
    """A line that changes; its own thread draws it, a few times a second."""

    seconds = 0.1

    def __init__(self, console: Any, first: int, rounds: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

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
            "", total=rounds, completed=first, values="compiling", pace=""
        )
        self.bar.start()

    def draw(self, round: int, values: str, pace: str) -> None:
        """Change the line."""
        self.bar.update(self.task, completed=round, values=values, pace=pace)

    def close(self) -> None:
        """Leave it where it is."""
        self.bar.stop()


class Plain:
    """A line of text every half minute, and one at the end."""

    seconds = 30.0

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def draw(self, round: int, values: str, pace: str) -> None:
        """Print it."""
        parts = filter(None, (f"round {round:,}/{self.rounds:,}", values, pace))
        print(" · ".join(parts), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is left to do."""


def round_up(seconds: float) -> str:
    """Seconds as 0:05 or 1:20:00."""
    minutes, rest = divmod(int(seconds + 0.999), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
