"""Ops that only voxelfield's own classes call. They may change without notice; `voxelfield.ops` has the public ones."""
