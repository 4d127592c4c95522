"""Courses of bricks of random sizes and colours, laid over cells of one stud each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from make_bricks.geometry.model import Model

Cells = set[tuple[int, int]]  # lower corners of squares of one stud

# Sizes to draw from, in studs along x and y.
LARGE = ((2, 4), (4, 2), (2, 2), (2, 3), (3, 2), (1, 2), (2, 1))
SLIM = ((1, 2), (2, 1), (1, 3), (3, 1))


def block(x0: int, x1: int, y0: int, y1: int) -> Cells:
    """Returns the cells of a rectangle, upper bounds excluded."""
    return {(x, y) for x in range(x0, x1) for y in range(y0, y1)}


def cover(cells: Cells, sizes: Sequence[tuple[int, int]], rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Covers cells with bricks of random sizes, without overlap.

    Args:
        cells: The cells to cover.
        sizes: Brick sizes to draw from; (1, 1) fills what is left.
        rng: Source of the draws.

    Returns:
        One (x, y, width, depth) for each brick.
    """
    free = set(cells)
    bricks: list[tuple[int, ...]] = []
    for x, y in sorted(cells):
        if (x, y) not in free:
            continue
        for width, depth in (*rng.permutation(sizes).tolist(), (1, 1)):
            under = {(x + i, y + j) for i in range(width) for j in range(depth)}
            if under <= free:
                free -= under
                bricks.append((x, y, width, depth))
                break
    return bricks


def masonry(
    model: Model,
    cells: Cells,
    z: float,
    height: float,
    palette: Sequence[str],
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, int]] = LARGE,
) -> None:
    """Adds one course of bricks over cells, in colours drawn from the palette."""
    for x, y, width, depth in cover(cells, sizes, rng):
        model.brick(str(rng.choice(palette)), x, y, z, (width, depth), height)
