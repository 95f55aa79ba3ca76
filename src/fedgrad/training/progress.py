"""Progress display: a live line in terminals and notebooks, occasional plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedgrad.algorithms.metrics import Metrics
from fedgrad.core.errors import ArgumentError
from fedgrad.core.notebook import Changing
from fedgrad.training.result_curves import span

SHOWN = 4  # hyperparameters in the line, at most
COMPILING = "compiling"  # shown until the first round is done


class Line(NamedTuple):
    """The line of a display: functions that draw it, and the time between updates."""

    draw: Callable[[int, str, str], None]  # (round, values, pace)
    say: Callable[[str], None]  # prints a permanent line
    seconds: float  # between two updates
    close: Callable[[], None] = lambda: None


class Display:
    """Shows the progress of training in one line, updated periodically and at the end.

    Training starts after round `first` with `clients` per round. Without a line, nothing is shown.
    """

    def __init__(self, line: Line | None = None, first: int = 0, clients: int = 0, rounds: int = 0):
        self.line, self.clients, self.rounds = line, clients, rounds
        self.first = self.start = self.round = first
        self.began = self.drawn = time.perf_counter()
        self.last: tuple[int, Metrics] | None = None
        if line is not None and first:
            left = f"resumed at round {first + 1:,} of {rounds:,}"
            line.say(left if first < rounds else f"all {rounds:,} rounds are done already")
        if line is not None and first < rounds:
            line.draw(first, COMPILING, "")

    def show(self, round: int, metrics: Metrics) -> None:
        """Remember a completed round, and draw it if an update is due."""
        self.round, self.last, now = round, (round, metrics), time.perf_counter()
        if round == self.first + 1:  # it includes compilation, so the pace is measured from here
            self.start, self.began = round, now
        if self.line is not None and now - self.drawn >= self.line.seconds:
            self._draw(self.line)

    def evaluating(self, done: int, there: int) -> None:
        """Show how many clients have been evaluated, if an update is due."""
        now = time.perf_counter()
        if self.line is not None and now - self.drawn >= self.line.seconds:
            self.drawn = now
            self.line.draw(self.round, f"evaluating, {done:,} of {there:,} clients", "")

    def close(self) -> None:
        """Draw the last round, and leave the line in place."""
        if self.line is not None:
            self._draw(self.line)
            self.line.close()

    def _draw(self, line: Line) -> None:
        if self.last is not None:
            round, metrics = self.last
            self.drawn, self.last = time.perf_counter(), None
            line.draw(round, values(metrics), self._pace(round))

    def _pace(self, round: int) -> str:
        """Return clients per second and the remaining time."""
        seconds = self.drawn - self.began
        if round <= self.start or seconds <= 0:
            return ""
        rate = (round - self.start) / seconds
        left = round_up((self.rounds - round) / rate)
        return f"{rate * self.clients:,.0f} clients/s · {left} left"


def display(progress: Any, first: int, rounds: int, clients: int) -> Display:
    """Return the display for the current kind of output.

    It writes to stderr, so that the stdout of a script is unchanged.
    """
    if progress is False or jax.process_index() > 0:  # only the first process shows progress
        return Display()
    from rich.console import Console  # imported late because it is slow

    if progress is not True and not isinstance(progress, Console):
        raise ArgumentError.here(f"progress={progress!r}: give True, False or a rich Console.")
    console = progress if isinstance(progress, Console) else Console(stderr=True)
    live = console.is_terminal and not console.is_dumb_terminal
    if console.is_jupyter:
        line = _notebook(first, rounds)
    else:
        line = _live(console, first, rounds) if live else _plain(rounds)
    return Display(line, first, clients, rounds)


def _live(console: Any, first: int, rounds: int) -> Line:
    """Return a live line, drawn by its own thread a few times per second."""
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("round {task.completed:,}/{task.total:,}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[values]}", markup=False),
        TextColumn("{task.fields[pace]}", style="dim", markup=False),
        console=console,
        refresh_per_second=5,
        # If stdout goes to a file, it must not be mixed with the terminal's output.
        redirect_stdout=sys.stdout.isatty(),
    )
    task = bar.add_task("", total=rounds, completed=first, values=COMPILING, pace="")
    bar.start()

    def draw(round: int, values: str, pace: str) -> None:
        bar.update(task, completed=round, values=values, pace=pace)

    return Line(draw, bar.console.print, 0.1, bar.stop)


def _notebook(first: int, rounds: int) -> Line:
    """Return a line of the cell's output that is updated in place."""
    line = Changing(_words(rounds, first, COMPILING, ""))
    return Line(lambda *now: line.write(_words(rounds, *now)), print, 0.2)


def _plain(rounds: int) -> Line:
    """Return a line that is printed at the start, every half minute, and at the end."""

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    return Line(lambda *now: say(_words(rounds, *now)), say, 30.0)


def _words(rounds: int, round: int, values: str, pace: str) -> str:
    return " · ".join(filter(None, (f"round {round:,}/{rounds:,}", values, pace)))


def round_up(seconds: float) -> str:
    """Format seconds as 0:05 or 1:20:00, rounded up."""
    minutes, rest = divmod(int(seconds + 0.999), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def values(metrics: Metrics) -> str:
    """Format the loss and the hyperparameters; side-by-side trials as a range."""
    numbers = ({} if metrics.loss is None else {"loss": metrics.loss}) | dict(metrics.hyper)
    most = SHOWN + ("loss" in numbers)
    shown = [f"{name} {span(value)}" for name, value in list(numbers.items())[:most]]
    if len(numbers) > most:
        shown.append(f"and {len(numbers) - most} more")
    return " · ".join(shown)
