"""PyTorch modules as JAX models: exported once, then translated through a table of operations."""
