"""The training step, the state it moves, and how it ends."""
