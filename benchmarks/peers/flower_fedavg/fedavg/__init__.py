"""Flower's own FedAvg strategy, moving a model of a given size; nearly nothing is computed."""
