"""Elastic training: failure detection, membership changes, and state transfer to joining nodes."""
