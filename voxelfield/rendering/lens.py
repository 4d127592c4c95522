"""Lenses that distort: what lies between the ray of a pinhole camera and the pixel that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor

from voxelfield.ops._checks import check_choice, check_field, is_readable
from voxelfield.ops._internal.lens import COEFFICIENTS

LensModel = Literal["perspective", "fisheye"]


class LensArguments(TypedDict, total=False):
    """What ops that cast rays take of a lens: nothing for pinholes."""

    lens: Tensor
    fisheye: bool


@dataclass(frozen=True, eq=False)
class Lens:
    r"""The lenses of some cameras, all of one model, with the terms that OpenCV, COLMAP and nerfstudio share.

    A pinhole shows a ray at a point :math:`(x, y)`, in focal lengths from the principal point, y down. With
    :math:`r^2 = x^2 + y^2` and :math:`R = 1 + k_1 r^2 + k_2 r^4 + k_3 r^6 + k_4 r^8`, a ``perspective`` lens shows it
    instead at

    .. math:: x R + 2 p_1 x y + p_2 (r^2 + 2 x^2), \quad y R + p_1 (r^2 + 2 y^2) + 2 p_2 x y.

    For a ``fisheye`` lens :math:`r` is the angle between ray and optical axis in radians, up to a half turn,
    instead of its tangent, so that coefficients of zero make an equidistant projection and no pinhole.

    Where the polynomial turns down, a lens shows nothing beyond. Points of an image farther out than that get a ray
    near the outermost one.

    Args:
        model: ``perspective`` or ``fisheye``.
        coefficients: (N, 6) float32, ``k1, k2, k3, k4, p1, p2`` of N cameras. They do not depend on the size of images.

    Raises:
        TypeError: ``coefficients`` are no float32 tensor.
        ValueError: There is no such model, or ``coefficients`` have another shape, or are not finite (checked on the
            CPU only, because reading them would wait for the device).
    """

    model: LensModel
    coefficients: Tensor

    def __post_init__(self) -> None:
        check_choice("Lens.model", self.model, ("perspective", "fisheye"))
        check_field("Lens.coefficients", self.coefficients, ("N", COEFFICIENTS), torch.float32)
        if is_readable(self.coefficients) and not bool(self.coefficients.isfinite().all()):
            raise ValueError(f"Lens.coefficients must be finite, got {self.coefficients.tolist()}")

    def __len__(self) -> int:
        return self.coefficients.shape[0]

    def __getitem__(self, index: slice | Tensor) -> Lens:
        return Lens(self.model, self.coefficients[index])

    def to(self, device: torch.device | str) -> Lens:
        """Returns the same lenses on ``device``."""
        return Lens(self.model, self.coefficients.to(device))

    @property
    def is_fisheye(self) -> bool:
        """Whether the terms apply to the angle off the optical axis instead of its tangent."""
        return self.model == "fisheye"


def lens_arguments(lens: Lens | None, camera: int | None = None) -> LensArguments:
    """Returns the arguments by which an op casts rays through lenses, of all cameras or of one."""
    if lens is None:
        return {}
    coefficients = lens.coefficients if camera is None else lens.coefficients[camera]
    return {"lens": coefficients, "fisheye": lens.is_fisheye}
