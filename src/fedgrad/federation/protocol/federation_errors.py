"""What can go wrong between a server and its clients."""

from fedgrad.core.errors import FederatedError


class FederationError(FederatedError):
    """Something went wrong on a real federation."""


class NoAnswer(FederationError):
    """Clients did not answer in time, or not with what was asked of them."""


class CohortMismatch(FederationError):
    """A client that took part in an earlier round of the call, or of which a value is needed, was
    lost: the sums so far are over other clients than those that can still come."""


class Refused(FederationError):
    """The policy of a site refuses what it was asked to do."""
