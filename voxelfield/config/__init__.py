"""Checked settings: how dataclasses say what is allowed, and how plain values become such dataclasses."""
