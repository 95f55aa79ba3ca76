"""Where a value lives: at the server, at one of the client placements, or anywhere."""

from dataclasses import dataclass

from fedgrad.core.errors import ArgumentError


@dataclass(frozen=True)
class Placement:
    """A group of clients. `fg.CLIENTS` is the usual one; make others for, say, a loss cohort."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ArgumentError.here(
                f"A placement is named by an identifier, got {self.name!r}. "
                'Write for example fg.Placement("eval").'
            )
        if self.name in ("server", "anywhere", "outer"):
            raise ArgumentError.here(
                f"{self.name!r} is not a client placement. Choose another name."
            )

    def __repr__(self) -> str:
        return f"Placement({self.name!r})"


CLIENTS = Placement("clients")

# Placements of values, as plain names so that they can be parameters of primitives. A value that
# depends on nothing (a constant) is ANYWHERE: every side can make it for itself, at no cost.
SERVER = "server"
ANYWHERE = "anywhere"
# What a program inside of another one captures from it: where that is, the outer program knows.
OUTER = "outer"


def is_client(at: str) -> bool:
    return at not in (SERVER, ANYWHERE, OUTER)
