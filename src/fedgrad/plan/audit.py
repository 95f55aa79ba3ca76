"""What leaves clients: only sums can, and here they are all listed."""

from dataclasses import dataclass

from fedgrad.core.misuse import describe
from fedgrad.core.placement import is_client
from fedgrad.core.primitives import where
from fedgrad.plan.plan import Plan, exchanges
from fedgrad.plan.stages import Steps


@dataclass(frozen=True)
class Release:
    """One value that clients add into a sum."""

    round: int
    placement: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    source: str  # the user's line that made the value
    clients: int  # over how many the sum goes

    def __str__(self) -> str:
        return (
            f"round {self.round}: sum over {self.placement} ×{self.clients} of "
            f"{self.dtype}{list(self.shape)}, {self.source}"
        )


@dataclass(frozen=True)
class Audit:
    """`ok`: everything that leaves a client is summed with what at least one other client sends."""

    releases: tuple[Release, ...]
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [str(release) for release in self.releases] or ["nothing leaves any client"]
        return "\n".join([*lines, *(f"! {finding}" for finding in self.findings)])


def audit(plan: Plan) -> Audit:
    releases = tuple(
        Release(
            number,
            x.placement,
            tuple(sent.aval.shape),
            str(sent.aval.dtype),
            sent.size,
            where(sent.origin[1]) if isinstance(sent.origin, tuple) else describe(sent),
            plan.clients[x.placement],
        )
        for number, x, _ in exchanges(plan.steps)
        for sent, _ in x.up
    )
    alone = [
        f"{placement} is one client, so its sum is that client's own value"
        for placement in dict.fromkeys(r.placement for r in releases)
        if plan.clients[placement] == 1
    ]
    return Audit(releases, tuple([*_leaks(plan.steps), *alone]))


def _leaks(steps: Steps) -> list[str]:
    """Server work that reads a client's value other than through a sum. There must be none; the
    check refuses such programs, and this looks at what is really executed."""
    found = []
    for step in steps.steps:
        for equation in step.server:
            found += [
                f"the server reads {describe(v)} of {v.at} ({where(equation.source)})"
                for v in equation.inputs
                if is_client(v.at)
            ]
        for loop in step.loops:
            for body in loop.bodies:
                found += _leaks(body)
    return found
