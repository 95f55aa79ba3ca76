"""Whether training that tunes itself needs no tuning: one run against the best of a sweep."""
