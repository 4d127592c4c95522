"""Checkpoints, their checks, and the run directory."""
