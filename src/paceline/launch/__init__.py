"""Launchers: on this machine, over ssh, detached; supervision, restarts and diagnosis of hosts."""
