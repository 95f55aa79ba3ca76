"""Transformations of algorithms: races, hypergradients, averaging, trials side by side."""
