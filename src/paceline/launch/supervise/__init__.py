"""Processes that a launcher watches: restarts, exit notes, a launcher that takes another one's place."""
