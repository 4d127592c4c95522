"""Captures before training: from photographs or a video to a scene with poses, and a look at what a scene holds."""
