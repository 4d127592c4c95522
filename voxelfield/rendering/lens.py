"""Lens distortion: the mapping between the rays of a pinhole camera and the pixels in which they appear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch
from torch import Tensor

from voxelfield.ops._checks import check_choice, check_field, is_readable
from voxelfield.ops._internal.lens import COEFFICIENTS

LensModel = Literal["perspective", "fisheye"]


class LensArguments(TypedDict, total=False):
    """The lens arguments of ops that cast rays; empty for pinhole cameras."""

    lens: Tensor
    fisheye: bool


@dataclass(frozen=True, eq=False)
class Lens:
    r"""Lenses of some cameras, all of one model, with the coefficients that OpenCV, COLMAP and nerfstudio share.

    A pinhole camera images a ray at a point :math:`(x, y)`, in focal lengths from the principal point, y down. With
    :math:`r^2 = x^2 + y^2` and :math:`R = 1 + k_1 r^2 + k_2 r^4 + k_3 r^6 + k_4 r^8`, a ``perspective`` lens images it
    instead at

    .. math:: x R + 2 p_1 x y + p_2 (r^2 + 2 x^2), \quad y R + p_1 (r^2 + 2 y^2) + 2 p_2 x y.

    For a ``fisheye`` lens, :math:`r` is the angle between ray and optical axis in radians, at most pi, instead of its
    tangent, so that coefficients of zero give an equidistant projection and not a pinhole camera.

    The image of a lens ends where the distorted radius stops growing with :math:`r`. Image points farther out get a ray
    near the outermost one.

    Args:
        model: ``perspective`` or ``fisheye``.
        coefficients: (N, 6) float32, ``k1, k2, k3, k4, p1, p2`` of N cameras. They do not depend on the image size.

    Raises:
        TypeError: ``coefficients`` is not a float32 tensor.
        ValueError: There is no such model, or ``coefficients`` has another shape or is not finite (checked on the CPU
            only, because the check would synchronise with the device).
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
        """Whether the polynomial applies to the angle from the optical axis instead of its tangent."""
        return self.model == "fisheye"


def lens_arguments(lens: Lens | None, camera: int | None = None) -> LensArguments:
    """Returns the arguments with which an op casts rays through the lenses of all cameras or of one."""
    if lens is None:
        return {}
    coefficients = lens.coefficients if camera is None else lens.coefficients[camera]
    return {"lens": coefficients, "fisheye": lens.is_fisheye}
