"""Measurements of a job and of a network, by trial."""
