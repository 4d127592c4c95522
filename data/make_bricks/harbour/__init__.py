"""The subject of the scene: one module for each place in the harbour."""
