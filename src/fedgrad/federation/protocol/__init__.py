"""The protocol between a server and its nodes (executor and node), independent of the engine."""
