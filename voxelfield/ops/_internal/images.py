"""Arguments and results shared by the ops that render a whole image in one kernel."""

from __future__ import annotations

from torch import Tensor

from voxelfield.ops._checks import check_at_least_one, check_float32
from voxelfield.ops._internal.lens import LENS_NUMBERS


def check_camera(
    c2w: Tensor, intrinsics: Tensor, width: int, height: int, background: Tensor, lens: Tensor | None
) -> None:
    """Raises unless these are one camera, the size of its image, and a colour."""
    for name, value, shape in (
        ("c2w", c2w, (4, 4)),
        ("intrinsics", intrinsics, (4,)),
        ("background", background, (3,)),
    ):
        check_float32(name, value, shape, "c2w", c2w)
    if lens is not None:
        check_float32("lens", lens, (LENS_NUMBERS,), "c2w", c2w)
    check_at_least_one("width", width)
    check_at_least_one("height", height)


def empty_image(c2w: Tensor, width: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns colours, opacities and depths for a compiler: shapes and dtypes without values."""
    return c2w.new_empty(height, width, 3), c2w.new_empty(height, width), c2w.new_empty(height, width)
