"""Who is alive, and what outlives them."""
