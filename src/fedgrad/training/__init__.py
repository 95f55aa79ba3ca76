"""Training: rounds one after another, watched, recorded, and never lost."""
