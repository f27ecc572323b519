"""What is wrong with hosts, links, clocks and ports, each with its remedy."""
