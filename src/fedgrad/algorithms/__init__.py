"""Federated algorithms: pairs of pure functions, `init` and `round`."""
