"""Transports: collectives and messages between nodes."""
