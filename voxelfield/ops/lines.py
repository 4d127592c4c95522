"""Grids along straight rays: integrals and their adjoint, and the first crossing of a level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor
from voxelfield.foundation.checks import (
    FLOATING,
    INTEGERS,
    check_at_least_one,
    check_field,
    check_finite,
    check_tensor,
    coordinate_dtype,
    lies_within,
    truth_of,
    widen_positions,
)
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError, shown
from voxelfield.ops._grids import PADDINGS, check_volumes, grid_size, shared_grid, splat_grids, summation_method
from voxelfield.ops._line_derivatives import RAYS, second_derivatives
from voxelfield.ops._separable import whole_scale
from voxelfield.ops._table import declare
from voxelfield.ops.grid import sample_trilinear

Limit = float | Tensor | None


def integrate_rays(
    grid: Tensor,
    origins: Tensor,
    directions: Tensor,
    near: Limit = None,
    far: Limit = None,
    *,
    labels: Tensor | None = None,
    label_count: int | None = None,
) -> Tensor:
    r"""Integrates a dense grid along rays, from where each enters the unit cube to where it leaves it.

    The result is :math:`\int f(o + t d)\, |d|\, dt` for the trilinear interpolant :math:`f` of the grid, with vertices
    on the faces of the cube (``align_corners=True``), and zero outside of it. It is exact up to rounding: within a cell
    :math:`f` is a cubic polynomial in :math:`t`, which two Gauss-Legendre nodes integrate exactly, so that there is no
    step to choose. No samples are stored. Detectors need no description: a parallel, fan or cone beam, or a curved
    detector, is its rays.

    Args:
        grid: (X, Y, Z, C), channels last, or a batch (B, X, Y, Z, C); float32, float64, float16 or bfloat16, on CPU or
            CUDA. A grid that is expanded over the batch is read where it is.
        origins: (..., 3) where rays begin, in the coordinates of the unit cube, or (B, ..., 3) for a batch. float32 or
            float64; converted as for :func:`voxelfield.ops.sample_trilinear`. The two arguments are broadcast against
            each other: one source (3,) may have many directions. Rays of images are best left in their shape, (...,
            rows, columns, 3): neighbouring pixels of 64 x 64 and more are then walked together, which can be nearly
            twice as fast on a GPU.
        directions: (..., 3), of any length: the integral is over distances, in the units of the cube. A ray that misses
            the cube, has no direction or is not finite has the integral zero.
        near: The parameter :math:`t` at which each ray begins, a number or a tensor that broadcasts to (...). None is
            0, ``-math.inf`` the whole line.
        far: The parameter at which it ends, as ``near``. None is infinity.
        labels: (X, Y, Z), integers: integrate the vertices of each label separately, as if all others were zero. The
            integrals of all labels then add up to the integral of the grid.
        label_count: Number L of labels, if ``labels`` are given. Vertices with labels outside 0..L-1 do not count.

    Returns:
        (..., C), or (..., L, C) with labels, in the dtype of ``grid``; the arithmetic is at least float32.
        Differentiable twice with respect to ``grid``, ``origins``, ``directions``, ``near`` and ``far``, and any number
        of times with respect to ``grid`` alone. Second derivatives in rays count that the slope of :math:`f` jumps
        where rays cross the faces of cells. They are those of a sum over two samples in each cell, which is stored for
        a block of rays at a time; computing them takes many times as long as the first derivatives. Along a face
        itself, a derivative is one of the two one-sided ones.

        The gradient in the grid is :func:`backproject_rays`, and reproducible where that is.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or a number is out of range.
        NotImplementedError: A third derivative with respect to rays, forward mode, or a map is requested.
    """
    data, rays, lead = _checked_lines(grid, origins, directions, near, far)
    codes, count = _checked_labels(labels, label_count, grid.shape[-4:-1], grid)
    integrals: Tensor = _integrate(data, *rays, codes, count)
    return integrals.to(grid.dtype).view(*lead, *integrals.shape[rays[0].dim() - 1 :])


def backproject_rays(
    values: Tensor,
    origins: Tensor,
    directions: Tensor,
    resolution: int | Sequence[int],
    near: Limit = None,
    far: Limit = None,
    *,
    labels: Tensor | None = None,
    batched: bool = False,
) -> Tensor:
    r"""Distributes values of rays to the vertices of a new grid: the adjoint of :func:`integrate_rays`.

    :math:`\langle A g, v \rangle = \langle g, A^* v \rangle` for integrals :math:`A` and this :math:`A^*` along the
    same rays: each vertex receives the value of a ray times the weight that it has in the ray's integral.

    Args:
        values: (..., C), or (..., L, C) with labels; float32, float64, float16 or bfloat16, on CPU or CUDA.
        origins: (..., 3), as for :func:`integrate_rays`, as are the next four.
        directions: See ``origins``.
        resolution: Number of vertices along each of the three axes; a single int means the same along all.
        near: See ``origins``.
        far: See ``origins``.
        labels: (X, Y, Z), integers: each vertex receives the values of its label.
        batched: Whether the first dimension of rays and values is a batch, of which each element has its own grid.

    Returns:
        (X, Y, Z, C), or (B, X, Y, Z, C) if ``batched``, in the dtype of ``values``; sums of 16-bit values are computed
        in float32. Differentiable as :func:`integrate_rays`, with respect to ``values`` instead of ``grid``.

        On CUDA, from compute capability 9.0 on, the gradient or adjoint of one channel of at most float32 takes up to
        4 GiB while it is computed: two more float32 grids, if these are no larger and rays cross as many cells as the
        grid has. It does not with labels, or if sums are reproducible.

        Sums are bit-reproducible on the CPU, for any number of threads, and on CUDA under
        ``torch.use_deterministic_algorithms(True)``, where terms are rounded to multiples of about 2^-61 of the sum of
        all of them: a value that is not finite makes the whole grid not finite.

    Errors are those of :func:`integrate_rays`.
    """
    check_field("values", values, ("...",), FLOATING)
    size = grid_size("resolution", resolution)
    labelled = 1 if labels is None else 2
    if values.dim() < labelled + truth_of("batched", batched):
        raise ArgumentValueError(f"values must have shape (..., {'C' if labels is None else 'L, C'}), got no rays")
    rays, lead = _checked_rays(
        values, "values", origins, directions, near, far, batched, lead=values.shape[: values.dim() - labelled]
    )
    codes, count = _checked_labels(labels, None if labels is None else values.shape[-2], size, values)
    rows = values.to(rays[0].dtype).reshape(*rays[0].shape[:-1], *values.shape[len(lead) :])
    return _adjoint(rows, rays, codes, count, size).to(values.dtype)


def first_crossing(
    grid: Tensor, origins: Tensor, directions: Tensor, level: float = 0.0, near: Limit = None, far: Limit = None
) -> tuple[Tensor, Tensor]:
    r"""Finds where rays first meet a level of a dense grid, such as the surface of a signed distance.

    Every cell that a ray crosses is searched: the trilinear interpolant :math:`f` is a cubic polynomial along the ray
    there, and its first root is found from either side, however thin the part between two roots.

    Args:
        grid: (X, Y, Z, 1), or a batch (B, X, Y, Z, 1), as for :func:`integrate_rays`. It need not be a distance.
        origins: As for :func:`integrate_rays`, as are the next three but ``level``.
        directions: See ``origins``.
        level: The value to find.
        near: See ``origins``. A ray that begins on the level meets it there.
        far: See ``origins``.

    Returns:
        t: (...), float32, or float64 for a float64 grid: the parameter of the first crossing, ``origins + t *
            directions``; infinite if there is none within the cube. Differentiable twice with respect to ``grid``,
            ``origins`` and ``directions`` as an implicit function: :math:`\partial t = -\partial f / (\nabla f \cdot
            d)`. A ray that only touches the level, where :math:`\nabla f \cdot d = 0`, has no gradient.
        hit: (...), bool: whether there is one.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or ``level`` is not finite.
        NotImplementedError: A third derivative, forward mode, or a map is requested.
    """
    check_finite("level", level)
    data, rays, lead = _checked_lines(grid, origins, directions, near, far)
    check_tensor("grid", grid, (*grid.shape[:-1], 1))
    t, hit = _first_crossing(data, *rays, level)
    return t.view(lead), hit.view(lead)


# origins, directions, near, far and the columns of images, as the kernels take them
Rays = tuple[Tensor, Tensor, MaybeTensor, MaybeTensor, int]


def _checked_lines(
    grid: Tensor, origins: Tensor, directions: Tensor, near: Limit, far: Limit
) -> tuple[Tensor, Rays, torch.Size]:
    """Returns the grid and the rays for the kernels, and the shape of the rays as they were given."""
    check_volumes(grid)
    one = shared_grid(grid) if grid.dim() == 5 else None
    batched = grid.dim() == 5 and one is None
    rays, lead = _checked_rays(grid, "grid", origins, directions, near, far, batched)
    if grid.dim() == 5 and lead[:1] != grid.shape[:1]:
        raise ArgumentValueError(
            f"origins must have shape ({grid.shape[0]}, ..., 3) for grid of shape {tuple(grid.shape)}, got {(*lead, 3)}"
        )
    return (grid if one is None else one).to(rays[0].dtype), rays, lead


def _checked_rays(
    like: Tensor,
    like_name: str,
    origins: Tensor,
    directions: Tensor,
    near: Limit,
    far: Limit,
    batched: bool,
    lead: torch.Size | None = None,
) -> tuple[Rays, torch.Size]:
    """Returns rays for the kernels, (N, 3), or (B, N, 3) if ``batched``, and their shape as given, or ``lead``."""
    wide, given = coordinate_dtype(like.dtype), []
    for name, x in (("origins", origins), ("directions", directions)):
        check_field(name, x, ("...", 3), FLOATING, like_name, like)
        given.append(widen_positions(name, x, wide).to(wide))
    if lead is None:
        # Along each axis the length that is not 1; the check below finds others that differ.
        short, long = sorted((x.shape[:-1] for x in given), key=len)
        padded = (1,) * (len(long) - len(short)) + tuple(short)
        lead = torch.Size(y if x == 1 else x for x, y in zip(padded, long, strict=True))
    for name, x in zip(("origins", "directions"), given, strict=True):
        _check_expands(name, x.shape, torch.Size((*lead, 3)))
    if batched and not lead:
        raise ArgumentValueError(f"origins must have shape (B, ..., 3) for a batch, got {tuple(origins.shape)}")
    shape = (lead[0], math.prod(lead[1:])) if batched else (math.prod(lead),)
    start, along = (x.expand(*lead, 3).reshape(*shape, 3) for x in given)
    limits: list[MaybeTensor] = []
    for name, limit, default in (("near", near, 0.0), ("far", far, math.inf)):
        if not isinstance(limit, Tensor):
            if limit is not None and not lies_within(name, limit, -math.inf, math.inf):
                raise ArgumentValueError(f"{name} must be a number, got {shown(limit)}")
            limits.append(None if limit is None or limit == default else start.new_full(shape, limit))
            continue
        check_field(name, limit, ("...",), FLOATING, like_name, like)
        _check_expands(name, limit.shape, lead)
        limits.append(limit.to(wide).expand(lead).reshape(shape))
    # One dimension of rays is a list; two are an image.
    columns = max(1, lead[-1]) if len(lead) > 1 + batched else 1
    return (start, along, *limits, columns), lead  # type: ignore[return-value]


def _check_expands(name: str, shape: torch.Size, wanted: torch.Size) -> None:
    # Not `x not in (1, y)`, of which a compiler makes a comparison of symbols that fails where both are equal.
    if len(shape) > len(wanted) or any(x != 1 and x != y for x, y in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ArgumentValueError(f"{name} must have a shape that expands to {tuple(wanted)}, got {tuple(shape)}")


def _checked_labels(
    labels: Tensor | None, label_count: int | None, size: Sequence[int], like: Tensor
) -> tuple[MaybeTensor, int]:
    """Returns labels for the kernels, and their number: 1 without labels."""
    if labels is None:
        if label_count is not None:
            raise ArgumentValueError(f"labels must be given with label_count={shown(label_count)}, got None")
        return None, 1
    check_field("labels", labels, (*size,), INTEGERS, "the other tensors", like)
    if label_count is None:
        raise ArgumentTypeError("label_count must be the number of labels, got None")
    check_at_least_one("label_count", label_count)
    return labels.to(torch.int32), label_count


def _adjoint(values: Tensor, rays: Sequence[Any], labels: MaybeTensor, label_count: int, size: Sequence[int]) -> Tensor:
    """Runs the raw op that backprojects rows of values."""
    # The weights of a ray add up to its length in the cube, of which sums of whole numbers have room for more.
    scale = whole_scale(values, size, False)
    return _backproject(values, *rays, labels, label_count, [*size], scale)


def _gradients(grad: Tensor, needs: set[str], **arguments: Any) -> dict[str, Any]:
    """Differentiates integrals of a ``grid``, or the adjoint of ``values``, which is linear in the same way."""
    rays, found = [arguments[name] for name in (*RAYS, "columns")], {}
    labels = arguments["labels"], arguments["label_count"]
    if "grid" in needs:
        found["grid"] = _adjoint(grad, rays, *labels, arguments["grid"].shape[-4:-1])
    if "values" in needs:
        found["values"] = _integrate(grad, *rays, *labels)
    if needs.isdisjoint(RAYS):
        return found
    values, grid = (grad, arguments["grid"]) if "grid" in arguments else (arguments["values"], grad)
    start, along, near, far = _line_gradient(values, grid, *rays, *labels).split((3, 3, 1, 1), dim=-1)
    of_rays = {"origins": start, "directions": along, "near": near.squeeze(-1), "far": far.squeeze(-1)}
    return found | {name: gradient for name, gradient in of_rays.items() if name in needs}


def _crossing_gradients(
    grad_t: Tensor, grid: Tensor, origins: Tensor, directions: Tensor, t: Tensor, hit: Tensor, needs: set[str]
) -> dict[str, Any]:
    """Differentiates the equation f(origins + t directions) = level, by ops that are differentiable again."""
    points = origins + torch.where(hit, t, 0.0).unsqueeze(-1) * directions
    slope = sample_trilinear(grid, points, with_gradient=True)[1][..., 0, :]
    steepness = (slope * directions).sum(-1)
    crosses = hit & (steepness != 0)
    change = torch.where(crosses, -grad_t / torch.where(crosses, steepness, 1.0), 0.0).unsqueeze(-1)
    start = change * slope
    found = {"origins": start, "directions": torch.where(hit, t, 0.0).unsqueeze(-1) * start}
    if "grid" in needs:
        options = PADDINGS["border"], True, False, False, False, summation_method()
        found["grid"] = splat_grids(change, points, list(grid.shape[-4:]), *options)[0]
    return found


def _integrals(grid: Tensor, origins: Tensor, labels: MaybeTensor, label_count: int) -> Tensor:
    return grid.new_empty(*origins.shape[:-1], *([] if labels is None else [label_count]), grid.shape[-1])


def _sums(values: Tensor, origins: Tensor, size: Sequence[int]) -> Tensor:
    return values.new_empty(*origins.shape[:-2], *size, values.shape[-1])


def _crossings(grid: Tensor, origins: Tensor) -> tuple[Tensor, Tensor]:
    shape = origins.shape[:-1]
    return grid.new_empty(shape), grid.new_empty(shape, dtype=torch.bool)


_integrate = declare("integrate_rays", _integrals, gradients=_gradients, differentiable=("grid", *RAYS))
_backproject = declare("backproject_rays", _sums, gradients=_gradients, differentiable=("values", *RAYS))
_line_gradient = declare(
    "line_gradient",
    lambda origins: origins.new_empty(*origins.shape[:-1], 8),
    gradients=second_derivatives,
    differentiable=("values", "grid", *RAYS),
    public="integrate_rays",
)
_first_crossing = declare(
    "first_crossing", _crossings, gradients=_crossing_gradients, differentiable=("grid", "origins", "directions")
)
