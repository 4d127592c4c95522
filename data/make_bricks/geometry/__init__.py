"""Shapes: outlines, solids, and structures of bricks or bars."""
