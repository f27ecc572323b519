"""Where samples come from: sources that give any samples by index."""
