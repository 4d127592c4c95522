"""Captures before training: estimation of poses for photographs or a video, and inspection of a scene."""
