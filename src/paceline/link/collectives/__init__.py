"""Algorithms for a sum over all ranks, one per file: ``reduce(ranks, count, nodes)`` lists the messages."""
