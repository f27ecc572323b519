"""Deployment: copies the working tree and its data to other hosts, only what changed."""
