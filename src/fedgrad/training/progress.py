"""What one sees while it trains: a line that changes in a terminal and in a notebook, a plain one
now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedgrad.algorithms.metrics import Metrics
from fedgrad.core.errors import ArgumentError
from fedgrad.core.notebook import Changing
from fedgrad.training.result_curves import span

SHOWN = 4  # hyperparameters, at most
COMPILING = "compiling"  # what the first round does first


class Line(NamedTuple):
    """Where the line of a display is drawn, and how often."""

    draw: Callable[[int, str, str], None]  # a round, its values, the pace
    say: Callable[[str], None]  # a line that stays
    seconds: float  # between two times
    close: Callable[[], None] = lambda: None


class Display:
    """Shows how far training is: a line that is drawn now and then, and at the end.

    Training starts after round `first` and has `clients` a round. Without a line it is silent.
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
    """A line that changes; its own thread draws it, a few times a second."""
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("round {task.completed:,}/{task.total:,}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[values]}", markup=False),
        TextColumn("{task.fields[pace]}", style="dim", markup=False),
        console=console,
        refresh_per_second=5,
        # What goes into a file is not to be mixed with what goes to the terminal.
        redirect_stdout=sys.stdout.isatty(),
    )
    task = bar.add_task("", total=rounds, completed=first, values=COMPILING, pace="")
    bar.start()

    def draw(round: int, values: str, pace: str) -> None:
        bar.update(task, completed=round, values=values, pace=pace)

    return Line(draw, bar.console.print, 0.1, bar.stop)


def _notebook(first: int, rounds: int) -> Line:
    """A line of the cell's output that changes."""
    line = Changing(_words(rounds, first, COMPILING, ""))
    return Line(lambda *now: line.write(_words(rounds, *now)), print, 0.2)


def _plain(rounds: int) -> Line:
    """A line of text when it begins, every half minute, and at the end."""

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    return Line(lambda *now: say(_words(rounds, *now)), say, 30.0)


def _words(rounds: int, round: int, values: str, pace: str) -> str:
    return " · ".join(filter(None, (f"round {round:,}/{rounds:,}", values, pace)))


def round_up(seconds: float) -> str:
    """Seconds as 0:05 or 1:20:00."""
    minutes, rest = divmod(int(seconds + 0.999), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def values(metrics: Metrics) -> str:
    """The loss and the hyperparameters; of trials side by side, from the least to the most."""
    numbers = ({} if metrics.loss is None else {"loss": metrics.loss}) | dict(metrics.hyper)
    most = SHOWN + ("loss" in numbers)
    shown = [f"{name} {span(value)}" for name, value in list(numbers.items())[:most]]
    if len(numbers) > most:
        shown.append(f"and {len(numbers) - most} more")
    return " · ".join(shown)
