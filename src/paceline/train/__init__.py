"""`paceline train`: networks by name, their settings, learning rates and data."""
