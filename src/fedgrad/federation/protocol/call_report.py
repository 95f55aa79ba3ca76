"""What happened in one call of a program on a federation."""

from dataclasses import dataclass, field


@dataclass
class Bytes:
    """Arrays that one client received and sent, in bytes. `setup`: programs and constants, which
    a node is sent once."""

    down: int = 0
    up: int = 0
    setup: int = 0


@dataclass(frozen=True)
class Dropped:
    """A client that is in none of the sums, and why."""

    client: int
    placement: str
    reason: str


@dataclass
class Report:
    """Who took part in a call, who did not, and what was sent."""

    program: str
    asked: dict[str, int] = field(default_factory=dict)  # clients by placement
    answered: dict[str, int] = field(default_factory=dict)  # those that the result is of
    dropped: list[Dropped] = field(default_factory=list)
    restarts: int = 0  # how often it began again, without clients that were lost between rounds
    messages: int = 0  # times that nodes were sent something and waited for
    traffic: dict[int, Bytes] = field(default_factory=dict)  # by client, restarts included

    def of(self, client: int) -> Bytes:
        """The bytes of one client, to be added to."""
        return self.traffic.setdefault(client, Bytes())

    def __str__(self) -> str:
        took = [f"{self.answered.get(p, 0)} of {n} {p}" for p, n in self.asked.items()]
        lines = [f"{self.program}: {', '.join(took)} answered in {self.messages} messages"]
        lines += [f"  client {d.client} ({d.placement}) dropped: {d.reason}" for d in self.dropped]
        return "\n".join(lines)
