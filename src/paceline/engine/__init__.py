"""Local (intra-node) parallelism: how one node turns its share of a batch into a gradient."""
