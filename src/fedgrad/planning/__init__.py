"""The plan: stages, messages, their costs and what they reveal."""
