"""Trainable voxel grids, and the optimizer that updates them in one pass over memory."""
