"""Simulated trainings under faults, in virtual time: what happens is a function of a seed."""
