"""Ridge regression over sites, as a Flower app: `flwr run` starts it."""
