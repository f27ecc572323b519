"""Benchmarks of one machine."""
