"""How nodes agree."""
