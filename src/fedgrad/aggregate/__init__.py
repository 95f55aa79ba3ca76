"""Sums over clients: their arithmetic, and the interface for other ways to sum."""

from fedgrad.aggregate.aggregator import Aggregator, plain

__all__ = ["Aggregator", "plain"]
