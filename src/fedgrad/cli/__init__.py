"""The command `fedgrad`, one module for each of its commands."""

from fedgrad.cli.dispatch import main

__all__ = ["main"]
