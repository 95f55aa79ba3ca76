"""Sources of the examples of tasks: files that a user names, Hugging Face, or generated data."""
