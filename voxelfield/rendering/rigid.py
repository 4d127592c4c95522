"""Rigid motions of space, parametrised by six numbers each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# Squared angle below which the quotients are computed as series, whose truncation error is below float64 rounding.
_SMALL = 1e-2


def moved(poses: Tensor, origin: Sequence[float] | None, sign: int = 1) -> Tensor:
    """Returns poses (..., 4, 4) on the CPU moved by an origin (3,), or back, float64; as they are without one."""
    if not any(origin or ()):
        return poses
    return poses.double() + F.pad(sign * torch.tensor(origin, dtype=torch.float64)[:, None], (3, 0, 0, 1))


def pose_matrices(axes: Tensor, positions: Tensor) -> Tensor:
    """Returns matrices (..., 4, 4) whose columns are axes (..., 3, 3) and positions (..., 3), in their dtype."""
    matrices = F.pad(torch.cat((axes, positions[..., None]), dim=-1), (0, 0, 0, 1))
    matrices[..., 3, 3] = 1
    return matrices


def exp_se3(twists: Tensor) -> Tensor:
    r"""Computes the exponential map of se(3): a screw motion for each twist, the identity for zeros.

    With :math:`\theta = |\omega|`, the rotation is by :math:`\theta` about :math:`\omega` (Rodrigues), and the
    translation is :math:`(I + \frac{1 - \cos\theta}{\theta^2} [\omega]_\times + \frac{\theta - \sin\theta}{\theta^3}
    [\omega]_\times^2) v`. Infinitely differentiable, also at zero.

    Args:
        twists: (N, 6) floating point: the rotation vectors :math:`\omega`, radians, then :math:`v`.

    Returns:
        (N, 4, 4) in the same dtype.
    """
    rotation, velocity = twists[:, :3], twists[:, 3:]
    squared = rotation.square().sum(dim=1)
    sine, cosine, rest = (factor[:, None, None] for factor in _factors(squared))
    cross = _cross_matrices(rotation)
    # Outer products instead of matmul, because TF32 would round them to 11 bits.
    cross_squared = rotation[:, :, None] * rotation[:, None, :]
    eye = torch.eye(3, dtype=twists.dtype, device=twists.device)
    cross_squared = cross_squared - squared[:, None, None] * eye
    turned = eye + sine * cross + cosine * cross_squared
    mean = eye + cosine * cross + rest * cross_squared
    moved = (mean * velocity[:, None, :]).sum(dim=-1)
    return pose_matrices(turned, moved)


def log_se3(motions: Tensor) -> Tensor:
    """Computes the twists (N, 6) of rigid motions (N, 4, 4), the inverse of :func:`exp_se3`, with angles up to pi.

    Computed in float64, in the dtype of the motions. For half a turn, one of its two axes is chosen.
    """
    exact = motions.double()
    turns = quaternions(exact[:, :3, :3])
    cosine, axis = turns.abs()[:, :1], turns[:, 1:] * torch.where(turns[:, :1] < 0, -1, 1)
    sine = axis.norm(dim=1, keepdim=True)
    # For a sine that is too small to divide by, the angle is twice the sine.
    rotation = axis * torch.where(sine < 1e-9, 2.0, 2 * torch.atan2(sine, cosine) / sine.clamp(min=1e-9))
    # The columns of the matrix with which exp_se3 maps velocities to translations.
    units = torch.eye(3, dtype=exact.dtype, device=exact.device).repeat(len(exact), 1)
    columns = exp_se3(torch.cat((rotation.repeat_interleave(3, dim=0), units), dim=1))[:, :3, 3].view(-1, 3, 3)
    velocity = torch.linalg.solve(columns.mT, exact[:, :3, 3:])[..., 0]
    return torch.cat((rotation, velocity), dim=1).to(motions.dtype)


def compose(first: Tensor, second: Tensor) -> Tensor:
    """Returns the products (N, 4, 4) of matrices (N, 4, 4), unaffected by the precision setting of matmul."""
    return (first[:, :, :, None] * second[:, None, :, :]).sum(dim=2)


def turning_angles(first: Tensor, second: Tensor) -> Tensor:
    """Returns the angles (N,) float64, radians in [0, pi], between two sets of rotation matrices (N, 3, 3)."""
    between = (first.double()[:, :, :, None] * second.double()[:, :, None, :]).sum(dim=1)
    # atan2 of sine and cosine: near zero the cosine alone is flat, which would lose half of the digits.
    cosine, *sine = quaternions(between).unbind(1)
    return 2 * torch.atan2(torch.stack(sine, dim=1).norm(dim=1), cosine.abs())


def quaternions(rotations: Tensor) -> Tensor:
    """Returns unit quaternions (N, 4), real part first and of either sign, of rotation matrices (N, 3, 3)."""
    (a, b, c), (d, e, f), (g, h, i) = (row.unbind(1) for row in rotations.unbind(1))
    # Each row is the quaternion times four times one of its components; the row of the largest is the most accurate.
    rows = (
        (1 + a + e + i, h - f, c - g, d - b),
        (h - f, 1 + a - e - i, d + b, c + g),
        (c - g, d + b, 1 - a + e - i, h + f),
        (d - b, c + g, h + f, 1 - a - e + i),
    )
    products = torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)
    largest = products.diagonal(dim1=1, dim2=2).argmax(dim=1)
    chosen = products[torch.arange(len(products), device=products.device), largest]
    return chosen / chosen.norm(dim=1, keepdim=True)


def rotations(quaternions: Tensor) -> Tensor:
    """Returns the rotation matrices (N, 3, 3) of unit quaternions (N, 4), real part first."""
    real, axis = quaternions[:, :1, None], quaternions[:, 1:]
    eye = torch.eye(3, dtype=axis.dtype, device=axis.device)
    return (2 * real.square() - 1) * eye + 2 * real * _cross_matrices(axis) + 2 * axis[:, :, None] * axis[:, None, :]


def _factors(squared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sin(a) / a, (1 - cos(a)) / a^2 and (a - sin(a)) / a^3 of squared angles (N,)."""
    small = squared < _SMALL
    # Replacing the inputs of the unused branch makes its derivatives finite. masked_fill instead of torch.where with a
    # number, which would be copied from the host: that is not possible during CUDA graph capture.
    near, far = squared.masked_fill(~small, 0.0), squared.masked_fill(small, 1.0)
    angle = far.sqrt()
    sine, half = angle.sin(), (angle / 2).sin()
    return (
        torch.where(small, _series(near, 1), sine / angle),
        torch.where(small, _series(near, 2), 2 * half.square() / far),
        torch.where(small, _series(near, 3), (angle - sine) / (angle * far)),
    )


def _series(x: Tensor, first: int) -> Tensor:
    """Returns the sum of (-x)^k / (first + 2 k)! over k."""
    total = torch.zeros_like(x)
    for k in reversed(range(6)):
        # Horner's scheme: each iteration divides by the two additional factors of the next factorial.
        total = 1 - total * x / ((first + 2 * k + 1) * (first + 2 * k + 2))
    return total / math.factorial(first)


def _cross_matrices(vectors: Tensor) -> Tensor:
    """Returns the cross-product matrices (N, 3, 3) of vectors (N, 3)."""
    x, y, z = vectors.unbind(-1)
    zero = torch.zeros_like(x)
    return torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), dim=-1).view(-1, 3, 3)
