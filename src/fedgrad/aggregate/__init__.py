"""How sums over clients are computed: their arithmetic, and the seam for other ways to sum."""

from fedgrad.aggregate.aggregator import Aggregator, plain

__all__ = ["Aggregator", "plain"]
