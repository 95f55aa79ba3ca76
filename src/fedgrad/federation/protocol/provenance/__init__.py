"""Provenance of the inputs of client stages: declared by programs and checked by nodes."""
