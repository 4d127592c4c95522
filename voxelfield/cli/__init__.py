"""The command ``voxelfield``: one file a verb."""
