"""The command ``voxelfield``: its verbs, in files by what they need."""
