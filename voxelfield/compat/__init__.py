"""Other projects' interfaces on voxelfield's kernels."""
