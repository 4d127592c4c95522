"""Training by several processes: the division of grids, exchanges and sums of gradients. One process skips it."""
