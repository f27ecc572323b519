"""Checkpoints: written whole or not at all, checked by hashes, resumed on any number of nodes."""
