"""How one process computes: forward, backward, the optimizer's step, and their state."""
