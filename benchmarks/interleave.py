"""Time competitors against each other as live processes, round by round in turn.

On a shared machine the noise of a minute is larger than the differences of interest; taking turns
gives every competitor the same noise, so that the ratios mean something where the times do not.

    python benchmarks/interleave.py ragged --rounds 20
    python benchmarks/interleave.py logistic --size '{"clients": 500}' --only drjax,vmap
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

PEERS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(PEERS))

from environment import PROJECT, PeerUnavailable, python_of  # noqa: E402

# Threads of the previous competitor may spin for a while after their work (OpenMP's do).
GAP_SECONDS = 0.02
# Of the norm of the weights. Float32 sums in another order, through ReLUs and many rounds.
TOLERANCE = {"logistic": 1e-4, "ragged": 1e-4, "cnn": 5e-3}
TASKS = 5e-3  # of how far a model of the paper's tasks has come
SLOWER = 1.25  # than the fastest of a group: left out after the rounds to warm up


@dataclass(frozen=True)
class Competitor:
    """A module of `peers/`, the environment it runs in, and what its `build` is given."""

    name: str
    peer: str
    workload: str
    venv: str = PROJECT
    size: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    own_noise: bool = False  # it draws random numbers of its own: nobody else has its weights


class Failed(Exception):
    """A competitor's process ended; the message is the end of what it wrote."""


class Live:
    """A competitor's worker process, which has to be waited for until it is ready."""

    def __init__(self, competitor: Competitor) -> None:
        self.competitor = competitor
        self.log = tempfile.TemporaryFile("w+")
        command = [str(python_of(competitor.venv)), "worker.py", competitor.peer]
        command += [competitor.workload, json.dumps(competitor.size)]
        self.process = subprocess.Popen(
            command,
            cwd=PEERS,
            env={**os.environ, "PROJECT_PYTHON": str(python_of(PROJECT)), **competitor.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def wait(self) -> dict[str, Any]:
        """What it says when it is ready."""
        return self._answer()

    def play(self, i: int) -> dict[str, float]:
        """Run round i and wait for it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"round": i}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the process is gone: `_answer` says why
        return self._answer()

    def close(self) -> None:
        """End the process: at the end of its input it leaves by itself."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise Failed(self.log.read().strip()[-800:] or "it said nothing")
        return json.loads(line)


def run(
    competitors: list[Competitor],
    rounds: int = 20,
    warmup: int = 2,
    groups: Sequence[Sequence[str]] = (),
    tolerance: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Median milliseconds a round, seconds of the first round and checksum, by competitor.

    A competitor that cannot be installed or that fails is left out, visibly. `agrees` is false
    where the weights of any round differ from those of most competitors, by more than the
    workload's tolerance or the one given. Of each of `groups`, those who are slow in the last round
    to warm up take no further part.
    """
    live: dict[str, Live] = {}
    versions: dict[str, dict[str, str]] = {}
    answers: dict[str, list[dict[str, float]]] = {}
    try:
        for competitor in competitors:
            try:
                live[competitor.name] = Live(competitor)
            except PeerUnavailable as reason:
                _skip(competitor.name, reason)
        for name in list(live):  # they get ready side by side
            try:
                versions[name] = live[name].wait()["versions"]
                answers[name] = []
            except Failed as reason:
                _skip(name, reason)
                live.pop(name).close()
        for i in range(warmup + rounds):
            if i == warmup:
                for name in [n for group in groups for n in _slow(group, answers)]:
                    live.pop(name).close()
                    answers.pop(name)
            names = list(live)
            turn = i % len(names) if names else 0  # nobody always follows the same neighbor
            for name in names[turn:] + names[:turn]:
                time.sleep(GAP_SECONDS)
                try:
                    answers[name].append(live[name].play(i))
                except Failed as reason:
                    _skip(name, reason)
                    live.pop(name).close()
                    answers.pop(name)
    finally:
        for one in live.values():
            one.close()
    alone = {c.name for c in competitors if c.own_noise}
    off = _disagreement({name: given for name, given in answers.items() if name not in alone})
    usual = {c.name: TOLERANCE.get(c.workload, TASKS) for c in competitors}
    results = {}
    for name, given in answers.items():
        timed = [answer["seconds"] for answer in given[warmup:]]
        results[name] = {
            "median_ms": statistics.median(timed) * 1e3,
            "best_ms": min(timed) * 1e3,
            "seconds": timed,
            "first_s": given[0]["seconds"],
            "checksum": given[-1]["checksum"],
            "agrees": None if name in alone else off[name] <= (tolerance or usual[name]),
            "off": off.get(name),
            "versions": versions[name],
        }
        if results[name]["agrees"] is False:
            print(f"[interleave] {name}: DISAGREES, by {off[name]:.1e} of the norm", flush=True)
    return results


def table(results: dict[str, dict[str, Any]], weights: bool = True) -> str:
    """The results as a Markdown table, slowest first; whether weights agree, where it is judged."""
    head = ["competitor", "median ms", "best ms", "x fastest", "first round s"]
    head += ["weights"] * weights
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    fastest = min((r["median_ms"] for r in results.values()), default=1.0)
    for name, r in sorted(results.items(), key=lambda item: -item[1]["median_ms"]):
        rows += [
            f"| {name} | {r['median_ms']:.2f} | {r['best_ms']:.2f} | "
            f"{r['median_ms'] / fastest:.2f} | {r['first_s']:.2f} |" + f" {verdict(r)} |" * weights
        ]
    return "\n".join(rows)


def verdict(result: dict[str, Any]) -> str:
    """Whether a competitor's weights are those of most."""
    known = {True: "agree", None: "own noise"}.get(result["agrees"])
    return known or f"DIFFER ({result['off']:.0e})"


def _disagreement(answers: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    # Against the median, so that one wrong competitor does not make all the others look wrong.
    worst = dict.fromkeys(answers, 0.0)
    for given in zip(*answers.values(), strict=True):
        middle = statistics.median_low([answer["checksum"] for answer in given])
        norm = statistics.median_low([answer["norm"] for answer in given])
        for name, answer in zip(answers, given, strict=True):
            distance = abs(answer["checksum"] - middle) / max(norm, 1e-12)
            # A NaN compares false with everything; it must not pass for agreement.
            worst[name] = max(worst[name], distance) if distance == distance else float("inf")
    return worst


def _slow(group: Sequence[str], answers: dict[str, list[dict[str, float]]]) -> list[str]:
    last = {name: answers[name][-1]["seconds"] for name in group if name in answers}
    slow = [name for name, seconds in last.items() if seconds > SLOWER * min(last.values())]
    for name in slow:
        print(f"[interleave] {name}: left out, {last[name]:.2f} s a round", flush=True)
    return slow


def _skip(name: str, reason: Exception) -> None:
    print(f"[interleave] {name}: SKIPPED, {type(reason).__name__}: {reason}", flush=True)


def main() -> None:
    """The command line: one workload, all of its competitors or some of them."""
    from table import WORKLOADS, competitors

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--size", type=json.loads, default={}, help='such as {"clients": 500}')
    parser.add_argument("--only", help="names, or parts of names, with commas between them")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    chosen = competitors(options.workload, **options.size)
    if options.only:
        wanted = options.only.split(",")
        chosen = [c for c in chosen if any(part in c.name for part in wanted)]
    before = machine.describe()
    results = run(chosen, options.rounds, options.warmup)
    print(before, f"\n{options.workload} {options.size or ''}\n\n{table(results)}", sep="\n")


if __name__ == "__main__":
    main()
