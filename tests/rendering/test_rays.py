"""Rays, packed samples and the ray-box intersection."""

from __future__ import annotations

import pytest
import torch

from voxelfield.rendering.rays import Rays, intersect_aabb

AABB = torch.tensor([[-1.0, -2.0, -3.0], [1.0, 2.0, 3.0]])


def make_rays(count=5, device="cpu"):
    directions = torch.nn.functional.normalize(torch.randn(count, 3, device=device), dim=-1)
    near, far = torch.rand(2, count, device=device).sort(dim=0)[0]
    return Rays(torch.randn(count, 3, device=device), directions, near, far)


def one(origin, direction, aabb=AABB):
    near, far = intersect_aabb(torch.tensor([origin]), torch.tensor([direction]), aabb)
    return near.item(), far.item()


@pytest.mark.parametrize(
    ("origin", "direction", "expected"),
    [
        pytest.param((-3.0, 0.0, 0.0), (1.0, 0.0, 0.0), (2.0, 4.0), id="through"),
        pytest.param((3.0, 0.5, 0.5), (-1.0, 0.0, 0.0), (2.0, 4.0), id="through backwards"),
        pytest.param((0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 3.0), id="starts inside"),
        pytest.param((-1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 2.0), id="starts on the face, goes in"),
        pytest.param((1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0), id="starts on the face, goes out"),
        pytest.param((3.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0), id="box behind"),
        pytest.param((-3.0, 2.5, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0), id="parallel, beside"),
        pytest.param((-3.0, -2.5, 0.0), (1.0, -0.0, 0.0), (0.0, 0.0), id="parallel, beside, minus zero"),
        pytest.param((-3.0, 2.0, 0.0), (1.0, 0.0, 0.0), (2.0, 4.0), id="parallel, in the high face"),
        pytest.param((-3.0, -2.0, 0.0), (1.0, -0.0, 0.0), (2.0, 4.0), id="parallel, in the low face"),
        pytest.param((-3.0, -2.0, 3.0), (1.0, 0.0, 0.0), (2.0, 4.0), id="along an edge"),
        pytest.param((-3.0, 5.0, 0.0), (0.6, 0.8, 0.0), (0.0, 0.0), id="oblique miss"),
        pytest.param((-2.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.0, 0.0), id="touches an edge only"),
        pytest.param((-5.0, 0.0, 0.0), (2.0, 0.0, 0.0), (2.0, 3.0), id="units of the direction's length"),
        pytest.param((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0), id="no direction"),
        pytest.param((float("nan"),) * 3, (1.0, 0.0, 0.0), (0.0, 0.0), id="NaN"),
    ],
)
def test_intersection_of_known_rays(origin, direction, expected):
    assert one(origin, direction) == pytest.approx(expected)


def test_intersection_bounds_exactly_the_inside(device):
    origins = torch.randn(4000, 3, dtype=torch.float64, device=device) * 3
    directions = torch.nn.functional.normalize(torch.randn_like(origins), dim=-1)
    directions[::5, 0] = 0.0
    directions[::7, 2] = -0.0
    aabb = AABB.to(device, torch.float64)
    near, far = intersect_aabb(origins, directions, aabb)
    hit = far > near
    assert 0.1 < hit.double().mean() < 0.9

    def inside(t):
        points = origins[:, None] + t[..., None] * directions[:, None]
        return ((points > aabb[0]) & (points < aabb[1])).all(dim=-1)

    fractions = torch.linspace(1e-6, 1 - 1e-6, 9, dtype=torch.float64, device=device)
    assert inside(near[:, None] + fractions * (far - near)[:, None])[hit].all()
    beyond = far[:, None] + torch.logspace(-6, 2, 200, dtype=torch.float64, device=device)
    assert not inside(beyond).any()
    before = near[:, None] * torch.linspace(0, 1 - 1e-6, 200, dtype=torch.float64, device=device)
    assert not inside(before)[near > 0].any()
    anywhere = torch.linspace(0, 30, 500, dtype=torch.float64, device=device).expand(4000, -1)
    assert not inside(anywhere)[~hit].any()


def test_intersection_of_no_rays(device):
    near, far = intersect_aabb(*torch.zeros(2, 0, 3, device=device), AABB.to(device))
    assert near.shape == far.shape == (0,)


def test_intersection_leaves_its_arguments_alone():
    origins, directions, aabb = torch.randn(4, 3), torch.randn(4, 3), AABB.clone()
    copies = origins.clone(), directions.clone(), AABB
    intersect_aabb(origins, directions, aabb)
    assert all(map(torch.equal, (origins, directions, aabb), copies))


POINTS = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("origins", "directions", "aabb", "error", "message"),
    [
        (POINTS, POINTS[:3], AABB, ValueError, r"directions must have shape \(4, 3\), got \(3, 3\)"),
        (POINTS, POINTS, AABB.flatten(), ValueError, r"aabb must have shape \(2, 3\), got \(6,\)"),
        (POINTS, POINTS, AABB.double(), TypeError, r"aabb must be float32, got float64"),
        (POINTS.long(), POINTS, AABB, TypeError, r"origins must be float32, got int64"),
        ([[0.0] * 3], POINTS, AABB, TypeError, r"origins must be a torch.Tensor, got list"),
    ],
)
def test_intersection_refuses_wrong_arguments(origins, directions, aabb, error, message):
    with pytest.raises(error, match=message):
        intersect_aabb(origins, directions, aabb)


def test_rays_are_indexed_together(device):
    rays = make_rays(device=device)
    assert len(rays) == 5
    for index in (slice(1, 4), torch.tensor([3, 0, 3], device=device), torch.arange(5, device=device) > 2):
        chosen = rays[index]
        assert len(chosen) == 3 if not isinstance(index, torch.Tensor) or index.dtype != torch.bool else 2
        for name in ("origins", "directions", "near", "far"):
            assert torch.equal(getattr(chosen, name), getattr(rays, name)[index])


def test_rays_move_together(device):
    rays = make_rays().to(device)
    moved = (rays.origins, rays.directions, rays.near, rays.far)
    assert {tensor.device.type for tensor in moved} == {torch.device(device).type}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("origins", torch.zeros(5, 2), ValueError, r"Rays.origins must have shape \(R, 3\), got \(5, 2\)"),
        ("directions", torch.zeros(4, 3), ValueError, r"directions must have shape \(5, 3\), got \(4, 3\)"),
        ("near", torch.zeros(5, 1), ValueError, r"Rays.near must have shape \(5\), got \(5, 1\)"),
        ("far", torch.zeros(5, device="meta"), ValueError, r"Rays.far must be on .* cpu, but it is on meta"),
        ("far", torch.zeros(5).double(), TypeError, r"Rays.far must be float32, got float64"),
        ("near", 0.0, TypeError, r"Rays.near must be a torch.Tensor, got float"),
    ],
)
def test_rays_refuse_wrong_fields(name, value, error, message):
    zeros = {"near": torch.zeros(5), "far": torch.zeros(5)}
    good = {"origins": torch.zeros(5, 3), "directions": torch.zeros(5, 3), **zeros}
    Rays(**good)
    with pytest.raises(error, match=message):
        Rays(**{**good, name: value})
