"""Poses of the training and test cameras, all of which look at the origin."""

from __future__ import annotations

import numpy as np

from make_bricks.arrays import Array

CAMERA_ANGLE_X = 0.6911112070083618  # radians; the horizontal field of view of NeRF-synthetic
CAMERA_DISTANCE = 4.0  # world units


def look_at_origin(azimuth: float, elevation: float) -> Array:
    """Poses a camera that looks at the origin from `CAMERA_DISTANCE`.

    Args:
        azimuth: Angle of the camera about the z axis, in radians, from x towards y.
        elevation: Angle of the camera above the xy plane, in radians, less than a right angle.

    Returns:
        Camera-to-world matrix (4, 4); the camera's x points right, its y up, and it looks along -z.
    """
    flat = np.cos(elevation)
    back = np.array([flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(elevation)])
    right = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
    c2w = np.eye(4)
    c2w[:3, :3] = np.stack([right, np.cross(back, right), back], axis=1)
    c2w[:3, 3] = CAMERA_DISTANCE * back
    return c2w


def hemisphere_cameras(count: int, seed: int = 11) -> Array:
    """Spreads cameras evenly over the upper hemisphere.

    Args:
        count: Number of cameras.
        seed: Seed of their order and of their jitter about the points of a Fibonacci lattice.

    Returns:
        Camera-to-world matrices (count, 4, 4), from 5 to 85 degrees of elevation.
    """
    rng = np.random.default_rng(seed)
    low, high = np.sin(np.radians([5.0, 85.0]))
    index = rng.permutation(count)
    height = low + (high - low) * (index + rng.random(count)) / count
    azimuth = index * np.pi * (3 - np.sqrt(5)) + rng.normal(0, 0.08, count)
    return np.stack([look_at_origin(a, e) for a, e in zip(azimuth, np.arcsin(height), strict=True)])


def orbit_cameras(count: int) -> Array:
    """Returns cameras that circle the origin twice and rise from 8 to 65 degrees and back, (count, 4, 4)."""
    turn = 2 * np.pi * np.arange(count) / count
    elevation = np.radians(36.5 - 28.5 * np.cos(turn))
    return np.stack([look_at_origin(2 * a + 0.3, e) for a, e in zip(turn, elevation, strict=True)])
