"""Where the examples of tasks come from: files that a user names, Hugging Face, or made here."""
