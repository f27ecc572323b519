"""`paceline doctor`: problems of hosts, links, clocks and ports, each with its remedy."""
