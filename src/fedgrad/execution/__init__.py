"""Executors: `reference` defines what a program means, every other one agrees with it."""
