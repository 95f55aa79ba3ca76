"""The plan: stages, messages, what they cost and what they reveal."""
