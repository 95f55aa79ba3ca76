"""Processes that were started here, identified reliably for as long as the machine is up."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process, identified by its pid and its start time, because pids are reused."""

    role: str
    pid: int
    started: str
    log: str

    @property
    def alive(self) -> bool:
        """Whether this very process is running."""
        return started(self.pid) == self.started


def start(role: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start a command in its own session, with its output in a log."""
    with open(log, "ab") as output:
        child = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    child.returncode = 0  # no wait needed: the process is tracked by its pid from here on
    return Process(role, child.pid, started(child.pid) or "", str(log))


def stop(processes: Sequence[Process], patience: float = 10.0) -> None:
    """End processes and their children: first with SIGTERM, then with SIGKILL."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, patience)):
        ends = time.monotonic() + seconds
        for process in processes:
            if process.alive:
                # The process leads its own group, so this reaches its children and nothing else.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        while any(process.alive for process in processes) and time.monotonic() < ends:
            time.sleep(0.05)


def started(pid: int) -> str | None:
    """Return the start time of a process in the system's own format; None if it is not running."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # reap our own child, so that it is no zombie
    try:
        return _started_by_proc(pid) if Path("/proc/self/stat").exists() else _started_by_ps(pid)
    except (OSError, subprocess.CalledProcessError):
        return None


def _started_by_proc(pid: int) -> str | None:
    # The command's name, in parentheses, may contain anything, so fields are counted after it.
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if state == "Z" else f"{boot}:{fields[18]}"


def _started_by_ps(pid: int) -> str | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    state, _, when = subprocess.check_output(command, text=True).strip().partition(" ")
    return None if state.startswith("Z") else when.strip()
