"""Handwritten digits at sites that each know some of them, in PyTorch: `flwr run` starts it."""
