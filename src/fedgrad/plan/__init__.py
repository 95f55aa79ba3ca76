"""The plan: stages, messages, what they cost, what they reveal, and how they look."""
