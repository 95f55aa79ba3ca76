"""Errors that arise between a server and its clients."""

from fedgrad.core.errors import FederatedError


class FederationError(FederatedError):
    """Something went wrong on a real federation."""


class NoAnswer(FederationError):
    """Clients did not answer in time, or their answers were not what was requested."""


class CohortMismatch(FederationError):
    """A client was lost that took part in an earlier round of the call, or whose value is needed.
    The sums computed so far are over a different set of clients than the ones that remain."""


class Refused(FederationError):
    """The policy of a site refuses a request."""
