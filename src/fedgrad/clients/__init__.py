"""Clients: their examples, cohorts, and the populations that cohorts are sampled from."""
