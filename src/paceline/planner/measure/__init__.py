"""Measurements of a job and of a network: profiles, trials and benchmarks."""
