"""Checkpoints: written atomically, verified by hashes, resumed on any number of nodes."""
