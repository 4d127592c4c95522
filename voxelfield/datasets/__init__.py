"""Scenes on disk: where they lie, how they are read, and the one type they become."""
