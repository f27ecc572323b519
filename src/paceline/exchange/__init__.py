"""Gradient synchronisation between nodes: all-reduce, an ordered sum, local SGD."""
