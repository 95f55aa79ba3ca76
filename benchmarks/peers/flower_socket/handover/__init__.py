"""fedgrad on Flower's own nodes, which hand each envelope to a warm process on a Unix socket."""
