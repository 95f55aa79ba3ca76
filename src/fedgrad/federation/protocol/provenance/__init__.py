"""Provenance: where inputs of clients' stages come from, declared by programs, checked by nodes."""
