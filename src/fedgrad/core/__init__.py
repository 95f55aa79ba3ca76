"""Programs with placed values: placements, the two primitives, tracing and checking."""
