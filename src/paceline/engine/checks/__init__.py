"""Checks of models, losses and optimizers, at `join` or in the first steps: errors and warnings."""
