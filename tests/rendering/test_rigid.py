"""Rigid motions against the matrix exponential, with their derivatives down to zero."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from voxelfield.rendering.rigid import compose, exp_se3, log_se3, quaternions, rotations, turning_angles

# Angles on both sides of where series take over, at 0.1, and up to a whole turn.
ANGLES = [0.0, 1e-8, 1e-4, 0.0999, 0.1001, 1.0, 3.0, 6.2]


def twists(angle: float) -> torch.Tensor:
    axes = F.normalize(torch.randn(4, 3, dtype=torch.float64), dim=-1)
    return torch.cat((angle * axes, torch.randn(4, 3, dtype=torch.float64)), dim=1)


def generators(twist: torch.Tensor) -> torch.Tensor:
    matrices = torch.zeros(len(twist), 4, 4, dtype=twist.dtype)
    for number, (x, y, z, *velocity) in enumerate(twist.tolist()):
        matrices[number, :3, :3] = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=twist.dtype)
        matrices[number, :3, 3] = torch.tensor(velocity, dtype=twist.dtype)
    return matrices


@pytest.mark.parametrize("angle", ANGLES)
def test_exponential_is_that_of_the_generator(angle):
    twist = twists(angle)
    torch.testing.assert_close(exp_se3(twist), torch.linalg.matrix_exp(generators(twist)), rtol=1e-12, atol=1e-12)


def test_zero_is_exactly_the_identity(device):
    assert torch.equal(exp_se3(torch.zeros(3, 6, device=device)), torch.eye(4, device=device).expand(3, 4, 4))


@pytest.mark.parametrize("angle", ANGLES)
def test_derivatives(angle):
    twist = twists(angle).requires_grad_()
    assert torch.autograd.gradcheck(exp_se3, (twist,))
    assert torch.autograd.gradgradcheck(exp_se3, (twist,))


def test_derivative_at_zero_is_the_generator():
    jacobian = torch.autograd.functional.jacobian(lambda twist: exp_se3(twist[None])[0], torch.zeros(6))
    for number, direction in enumerate(torch.eye(6)):
        assert torch.equal(jacobian[..., number], generators(direction[None])[0])


def test_compose_is_a_product():
    first, second = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(compose(first, second), first @ second)


@pytest.mark.parametrize("angle", [0.0, 1e-7, 0.5, 3.0, math.pi])
def test_turning_angles_tell_the_angle_between(angle):
    first = exp_se3(twists(1.3))[:, :3, :3]
    turned = compose(F.pad(first, (0, 1, 0, 1)), exp_se3(twists(angle)))[:, :3, :3]
    torch.testing.assert_close(
        turning_angles(first, turned), torch.full((4,), angle, dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_the_logarithm_undoes_the_exponential():
    wanted = torch.cat([twists(angle) for angle in (0.0, 1e-12, 1e-7, 0.01, 1.0, 2.0, 3.0, math.pi - 1e-6)])
    torch.testing.assert_close(log_se3(exp_se3(wanted)), wanted, rtol=1e-7, atol=1e-8)
    single = log_se3(exp_se3(wanted[:-4].float()))
    torch.testing.assert_close(single, wanted[:-4].float(), rtol=0, atol=1e-5)


def test_the_logarithm_of_half_a_turn_is_one():
    half = torch.eye(4, dtype=torch.float64) * torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    half[:3, 3] = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(exp_se3(log_se3(half[None]))[0], half, rtol=0, atol=1e-12)


@pytest.mark.parametrize("angle", [0.0, 1e-7, 1.0, 2.5, math.pi - 1e-9, math.pi])
def test_a_rotation_and_its_quaternion_are_one(angle):
    axes = F.normalize(torch.randn(4, 3, dtype=torch.float64), dim=-1)
    turned = exp_se3(torch.cat((angle * axes, torch.zeros_like(axes)), dim=1))[:, :3, :3]
    found = quaternions(turned)
    expected = torch.cat((torch.full((4, 1), math.cos(angle / 2)), math.sin(angle / 2) * axes), dim=1)
    torch.testing.assert_close((found * expected).sum(dim=1).abs(), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(rotations(found), turned, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotations(-found), turned, rtol=0, atol=1e-12)
