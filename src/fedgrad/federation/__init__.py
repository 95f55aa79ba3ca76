"""Real federations: what crosses the wire, what a site runs, and what it allows."""
