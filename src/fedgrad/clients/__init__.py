"""Clients: their examples, cohorts of them, and the populations these are sampled from."""
