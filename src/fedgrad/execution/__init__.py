"""Executors: `reference` defines the meaning of a program, and all others agree with it."""
