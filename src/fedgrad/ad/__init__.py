"""Derivatives of programs, which are programs again: forward, reverse, mixed, and the cheapest
mix."""
