"""What the paper says, set against what was measured here."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, whether it holds here, and the numbers that decide.

    `holds` is None for a statement about something that this experiment does not run.
    """

    statement: str
    holds: bool | None
    evidence: str

    @property
    def verdict(self) -> str:
        """In one word."""
        return {True: "holds", False: "DOES NOT HOLD", None: "not tested"}[self.holds]


def report(claims: Iterable[Claim]) -> str:
    """The claims as text, one paragraph each, and how many hold."""
    claims = list(claims)
    paragraphs = [f"[{c.verdict}] {c.statement}\n    {c.evidence}" for c in claims]
    return "\n".join([*paragraphs, f"{score(claims)}."])


def score(claims: Iterable[Claim]) -> str:
    """`6 of 7 tested claims hold`."""
    tested = [claim.holds for claim in claims if claim.holds is not None]
    return f"{sum(tested)} of {len(tested)} tested claims hold"
