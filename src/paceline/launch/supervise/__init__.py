"""Supervision of processes: restarts, exit notes, and a launcher that replaces another."""
