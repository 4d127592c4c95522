"""Training by several processes: the division of grids over them, and what they exchange. One process skips it."""
