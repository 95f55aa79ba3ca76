"""Flower as the engine that carries the protocol: the only room that imports it."""
