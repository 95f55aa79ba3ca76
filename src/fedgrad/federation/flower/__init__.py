"""Flower as the engine that carries the protocol. Only this package imports Flower."""
