"""How do our figures compare? Each contender in fresh processes, by turns."""
