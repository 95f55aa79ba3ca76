"""Modules of PyTorch as models in JAX: exported once, then read as a table of operations."""
