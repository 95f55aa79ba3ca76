"""Report of one call of a program on a federation."""

from dataclasses import dataclass, field


@dataclass
class Bytes:
    """Bytes of the arrays that one client received and sent. `setup` counts programs and constants,
    which a node is sent once."""

    down: int = 0
    up: int = 0
    setup: int = 0


@dataclass(frozen=True)
class Dropped:
    """A client that is in none of the sums, and the reason."""

    client: int
    placement: str
    reason: str


@dataclass
class Report:
    """The clients that took part in a call, those that did not, and what was sent."""

    program: str
    asked: dict[str, int] = field(default_factory=dict)  # clients by placement
    answered: dict[str, int] = field(default_factory=dict)  # clients that are in the result
    dropped: list[Dropped] = field(default_factory=list)
    restarts: int = 0  # times it began again without clients lost between rounds
    messages: int = 0  # times that nodes were sent something and waited for
    traffic: dict[int, Bytes] = field(default_factory=dict)  # by client, restarts included

    def of(self, client: int) -> Bytes:
        """Return the byte counts of one client, to be added to."""
        return self.traffic.setdefault(client, Bytes())

    def __str__(self) -> str:
        took = [f"{self.answered.get(p, 0)} of {n} {p}" for p, n in self.asked.items()]
        lines = [f"{self.program}: {', '.join(took)} answered in {self.messages} messages"]
        lines += [f"  client {d.client} ({d.placement}) dropped: {d.reason}" for d in self.dropped]
        return "\n".join(lines)
