"""Scenes: formats on disk, how they are found and read, and the type that they become."""
