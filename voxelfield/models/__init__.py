"""Models: one file per kind, looked up by name."""
