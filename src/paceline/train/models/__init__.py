"""Networks that can be trained by name, one per file."""
