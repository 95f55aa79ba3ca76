"""The training loop, with evaluation, logging, checkpoints and hyperparameter search."""
