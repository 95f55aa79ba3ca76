"""From algorithms to algorithms: races, hypergradients, averages, trials side by side."""
