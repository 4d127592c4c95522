"""The command ``voxelfield``: one file per verb."""
