"""How one node turns its share of a batch into a gradient."""
