"""Dimensions of toy bricks, in studs: the distance between the centres of two neighbouring studs is 1."""

from __future__ import annotations

BRICK, PLATE, TILE = 1.2, 0.4, 0.32  # heights; a tile has no studs and hides those below it
GAP, BEVEL = 0.03, 0.05  # space around a brick, and size of its cut edges
STUD_RADIUS, STUD_HEIGHT = 0.3, 0.2
