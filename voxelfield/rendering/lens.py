"""Lenses: the mapping between the rays of a camera and the pixels in which they appear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from voxelfield.foundation.autograd import hold_constant
from voxelfield.foundation.checks import check_choice, check_field
from voxelfield.ops._internal.cameras import LENS_NUMBERS, lens_points, lens_rays, sphere_points, sphere_rays

LensModel = Literal[
    "pinhole",
    "perspective",
    "rational",
    "fisheye",
    "fisheye624",
    "field_of_view",
    "division",
    "extended_unified",
    "equirectangular",
]

_OPENCV = ("k1", "k2", "k3", "k4", "p1", "p2", "s1", "s2", "s3", "s4", "k5", "k6")

LENS_TERMS: dict[LensModel, tuple[str, ...]] = {
    "pinhole": (),
    "perspective": _OPENCV[:10],
    "rational": _OPENCV,
    "fisheye": _OPENCV[:10],
    "fisheye624": _OPENCV,
    "field_of_view": ("omega",),
    "division": ("k",),
    "extended_unified": ("alpha", "beta"),
    "equirectangular": (),
}
"""The models in the order of their numbers in extension/cameras/lens.h, and the order of each model's coefficients.

The extension does not know the last one, whose rays :class:`voxelfield.Cameras` casts.
"""

_SPHERE = list(LENS_TERMS).index("equirectangular")

# A field-of-view lens below this angle, in radians, differs from a pinhole by less than float32 resolves.
_SMALLEST_OMEGA = 1e-4


@dataclass(frozen=True, eq=False, init=False)
class Lens:
    r"""Lenses of some cameras, each with its model.

    A pinhole camera images a ray at a point :math:`(x, y)`, in focal lengths from the principal point, y down. The
    other models, which OpenCV, COLMAP and nerfstudio also have, image it elsewhere. With :math:`r^2 = x^2 + y^2`:

    ``perspective``, with coefficients ``k1, k2, k3, k4, p1, p2, s1, s2, s3, s4`` in this order, images it at

    .. math::

       x R + 2 p_1 x y + p_2 (r^2 + 2 x^2) + s_1 r^2 + s_2 r^4, \quad
       y R + p_1 (r^2 + 2 y^2) + 2 p_2 x y + s_3 r^2 + s_4 r^4,

    where :math:`R = 1 + k_1 r^2 + k_2 r^4 + k_3 r^6 + k_4 r^8`.

    ``rational``, with ``k5, k6`` after those, has :math:`R = (1 + k_1 r^2 + k_2 r^4 + k_3 r^6) / (1 + k_4 r^2 + k_5 r^4
    + k_6 r^6)`.

    ``fisheye`` has the coefficients of ``perspective``, but :math:`r` is the angle between ray and optical axis in
    radians, at most pi, instead of its tangent. Coefficients of zero give an equidistant projection, not a pinhole.

    ``fisheye624`` has the coefficients of ``rational``, all of ``k1`` to ``k6`` in one polynomial of the angle. The
    ``p`` and ``s`` terms apply to the point :math:`(x R, y R)` instead of :math:`(x, y)`.

    ``field_of_view``, with ``omega`` in radians, images the ray at :math:`\arctan(2 r \tan(\omega / 2)) / (\omega r)`
    times :math:`(x, y)`.

    ``division``, with ``k``, images it at the point whose division by :math:`1 + k d^2` is :math:`(x, y)`, where
    :math:`d` is the distance of that point from the principal point.

    ``extended_unified``, with ``alpha`` from 0 to 1 and ``beta`` above 0, images it at :math:`(x, y)` divided by
    :math:`\alpha \sqrt{\beta r^2 + 1} + 1 - \alpha`.

    ``equirectangular``, a panorama, images a ray at its angles in radians: that to the right of the optical axis, and
    that down from the plane of the optical axis and the x axis. Focal lengths are pixels per radian, and 2 pi of them
    are the whole circle. The image may be a part of it, across the seam behind the camera too.

    The image of a lens ends where the distance from the principal point stops growing with :math:`r`. Image points
    farther out get a ray near the outermost one.

    Args:
        model: The model of all N cameras, or a sequence with the model of each.
        coefficients: (N, C) float32, the first C coefficients of each camera in the order above; others are zero. They
            do not depend on the image size. A row beyond the coefficients of its model must be zero.

    Attributes:
        rows: (N, 14) float32, the lenses as ops take them, on the device of ``coefficients``.
        spheres: Whether some cameras may be equirectangular, a model that ops do not know.

    Raises:
        TypeError: ``coefficients`` is not a float32 tensor.
        ValueError: There is no such model, the numbers of models and rows differ, or ``coefficients`` has another
            shape, is not finite, or is out of a model's range. To check this, the constructor waits for the device.
        NotImplementedError: ``coefficients`` carries a tangent of forward-mode differentiation.
    """

    rows: Tensor
    spheres: bool

    def __init__(self, model: LensModel | Sequence[LensModel], coefficients: Tensor) -> None:
        check_field("Lens.coefficients", coefficients, ("N", "C"), torch.float32)
        if coefficients.is_meta:
            raise ValueError("Lens.coefficients must have values, which the constructor reads, got a tensor on meta")
        count, columns = coefficients.shape
        several = isinstance(model, Sequence) and not isinstance(model, str)
        for each in model if several else [model]:
            check_choice("Lens.model", each, LENS_TERMS)
        models = list(model) if several else [model] * count
        if len(models) != count:
            raise ValueError(
                f"Lens.model must be one model, or one for each of {count} rows of coefficients, got {len(models)}"
            )
        if columns > len(_OPENCV):
            raise ValueError(f"Lens.coefficients must have at most {len(_OPENCV)} columns, got {columns}")
        (coefficients,) = hold_constant("Lens", coefficients=coefficients)
        rows = [_row(each, tuple(terms)) for each, terms in zip(models, coefficients.tolist(), strict=True)]
        numbers = torch.tensor(rows, dtype=torch.float32, device=coefficients.device)
        object.__setattr__(self, "rows", numbers.view(count, LENS_NUMBERS))
        object.__setattr__(self, "spheres", "equirectangular" in models)

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, index: slice | Tensor) -> Lens:
        return _from_rows(self.rows[index], self.spheres)

    def to(self, device: torch.device | str) -> Lens:
        """Returns the same lenses on ``device``."""
        return _from_rows(self.rows.to(device), self.spheres)

    @property
    def models(self) -> tuple[LensModel, ...]:
        """The model of each camera. A lens that distorts nothing is a ``pinhole``. Waits for the device."""
        names = tuple(LENS_TERMS)
        return tuple(names[int(number)] for number in self.rows[:, 0].tolist())

    @property
    def coefficients(self) -> Tensor:
        """The coefficients (N, 12) of each camera, in the order of its model."""
        return self.rows[:, 2:]

    def described(self, camera: int) -> tuple[LensModel, dict[str, float]]:
        """Returns the model of one camera, and its coefficients that are not zero, by name. Waits for the device."""
        (model,) = self[camera : camera + 1].models
        terms = zip(LENS_TERMS[model], self.coefficients[camera].tolist(), strict=False)
        return model, {name: value for name, value in terms if value != 0}

    @property
    def is_sphere(self) -> Tensor:
        """(N,) bool: which are equirectangular."""
        return self.rows[:, 0] == _SPHERE

    def rays_through(self, points: Tensor, cameras: Tensor) -> Tensor:
        """Returns the rays that image points show, without derivatives; does not synchronise with the device.

        Args:
            points: (R, 2) float32, in focal lengths from the principal point, x to the right and y down.
            cameras: (R,) int64, the camera of each point.

        Returns:
            (R, 3) float32: right, down and forward in the camera's frame, of any length.
        """
        rows = self.rows.index_select(0, cameras)
        rays = lens_rays(points, rows)
        return torch.where(rows[:, :1] == _SPHERE, sphere_rays(points.detach()), rays) if self.spheres else rays

    def points_of(self, rays: Tensor, camera: int) -> Tensor:
        """Projects rays (R, 3) to image points (R, 2) of one camera, the inverse of :meth:`rays_through`.

        The result is meaningless for rays that the lens cannot image
        (:func:`voxelfield.ops._internal.cameras.lens_points`).
        """
        row = self.rows[camera : camera + 1]
        points = lens_points(rays, row)
        return torch.where(row[:, :1] == _SPHERE, sphere_points(rays), points) if self.spheres else points

    def without_distortion(self) -> Lens:
        """Returns equidistant fisheyes in place of fisheyes, and pinholes in place of all others but panoramas."""
        kept: dict[LensModel, LensModel] = {"fisheye": "fisheye", "fisheye624": "fisheye"}
        kept["equirectangular"] = "equirectangular"
        return Lens([kept.get(model, "pinhole") for model in self.models], self.rows[:, :0])


def join_lenses(lenses: Sequence[Lens | None]) -> Lens | None:
    """Joins lenses on the CPU, of which None stands for one pinhole camera; returns None if all are pinholes."""
    pinhole = Lens("pinhole", torch.zeros(1, 0))
    each = [pinhole if lens is None else lens for lens in lenses]
    joined = _from_rows(torch.cat([lens.rows for lens in each]), any(lens.spheres for lens in each))
    return joined if bool(joined.rows[:, 0].any()) else None


def _from_rows(rows: Tensor, spheres: bool) -> Lens:
    lens = object.__new__(Lens)
    object.__setattr__(lens, "rows", rows)
    object.__setattr__(lens, "spheres", spheres)
    return lens


# The cameras of a capture mostly share a lens.
@lru_cache(maxsize=1024)
def _row(model: LensModel, values: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the row of numbers of a lens."""
    names = LENS_TERMS[model]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"Lens.coefficients must be finite, got {list(values)}")
    if any(values[len(names) :]):
        known = ", ".join(names) or "none"
        raise ValueError(f"Lens.coefficients of a {model} must be zero but for {known}, got {list(values)}")
    terms = dict.fromkeys(names, 0.0) | dict(zip(names, values, strict=False))
    if not abs(terms.get("omega", 0.0)) < math.pi:
        raise ValueError(f"Lens.coefficients: omega must be between -pi and pi, got {terms['omega']}")
    if not (0 <= terms.get("alpha", 0.0) <= 1 and terms.get("beta", 1.0) > 0):
        raise ValueError(f"Lens.coefficients: alpha must be in [0, 1] and beta above 0, got {terms}")
    if model == "extended_unified":
        is_pinhole = terms["alpha"] == 0
    elif model == "field_of_view":
        is_pinhole = abs(terms["omega"]) < _SMALLEST_OMEGA
    else:
        is_pinhole = "fisheye" not in model and model != "equirectangular" and not any(terms.values())
    if is_pinhole:
        model, terms = "pinhole", {}
    numbers = [*terms.values(), *[0.0] * (len(_OPENCV) - len(terms))]
    constant = (
        2 * math.tan(abs(terms["omega"]) / 2) if model == "field_of_view" else _largest_ideal_radius(model, terms)
    )
    return (float(list(LENS_TERMS).index(model)), constant, *numbers)


def _largest_ideal_radius(model: LensModel, terms: dict[str, float]) -> float:
    """Returns the radius beyond which the distorted radius is meaningless: infinity for most lenses.

    Where the distorted radius falls and then grows again, or passes a pole, Newton's iteration could otherwise end
    beyond the part of the lens that forms the image. The fold itself is found by the iteration, because the ``p`` and
    ``s`` terms move it, so that a lens may have a ray somewhat beyond the fold of its radial part.
    """
    k = [terms.get(f"k{number}", 0.0) for number in range(1, 7)]
    if model != "rational" and min(k) >= 0:
        return math.inf
    square = Polynomial([0.0, 1.0])
    polynomials = ([1.0, *k[:3]], [1.0, *k[3:]]) if model == "rational" else ([1.0, *k], [1.0])
    above, below = map(Polynomial, polynomials)
    # The derivative of radius * above / below, times below squared.
    growth = above * below + 2 * square * (above.deriv() * below - above * below.deriv())
    folds, poles = _positive_roots(growth), _positive_roots(below)
    first_pole = poles[0] if poles else math.inf
    if not folds or first_pole < folds[0]:
        return first_pole
    return (folds[0] + min([*folds[1:2], first_pole, math.inf])) / 2


def _positive_roots(polynomial: Polynomial) -> list[float]:
    """Returns the positive radii whose squares are roots, in order."""
    roots = polynomial.trim().roots()
    return sorted(math.sqrt(root.real) for root in roots if root.real > 0 and abs(root.imag) <= 1e-9 * root.real)
