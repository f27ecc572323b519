"""The working tree and its data on other hosts: what changed is sent."""
