"""The command `fedgrad`, one module for each of its commands."""

from fedgrad.cli.command import main

__all__ = ["main"]
