"""Signed distances: bounds, reinitialisation, fusion of depth images, marching cubes. Contracts: test_contracts.py."""

from __future__ import annotations

import math

import pytest
import torch

from voxelfield import ops
from voxelfield.ops import distances

BOX = torch.tensor([[-1.0, -0.8, -1.2], [1.0, 0.8, 1.2]], dtype=torch.float64)


def lattice(size=(33, 25, 41), box=BOX):
    axes = [torch.linspace(low, high, n, dtype=torch.float64) for low, high, n in zip(*box.tolist(), size, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def sphere(points, radius=0.55):
    return points.norm(dim=-1, keepdim=True) - radius


def test_bounds_hold_outside_and_meet_at_the_faces():
    grid = sphere(lattice())
    points = 3 * torch.randn(2000, 3, dtype=torch.float64)
    true = sphere(points)
    upper, lower = (ops.sample_distance(grid, points, BOX, bound=bound) for bound in ("upper", "lower"))
    outside = ((points < BOX[0]) | (points > BOX[1])).any(dim=1)
    slack = 2e-3  # of linear interpolation
    assert (upper + slack >= true).all()
    assert (lower - slack <= true)[outside].all()
    assert (upper <= math.sqrt(2) * lower + slack)[outside].all()
    torch.testing.assert_close(upper[~outside], lower[~outside])
    faces = torch.minimum(torch.maximum(points, BOX[0]), BOX[1])
    near = faces + 1e-7 * (points - faces)
    for bound in ("upper", "lower"):
        at, beside = (ops.sample_distance(grid, p, BOX, bound=bound) for p in (faces, near))
        torch.testing.assert_close(at, beside, rtol=0, atol=1e-5)


# --- reinitialisation


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_redistance_of_a_sphere(device, dtype):
    points = lattice()
    true = sphere(points)
    bent = (true * (1 + 3 * points[..., :1].square())).to(device, dtype)
    found = ops.redistance(bent, BOX.to(device)).cpu()
    assert found.dtype == dtype
    step = 1.6 / 24
    error = (found.double() - true).abs() / step
    assert error.mean() < 0.04
    assert error.max() < 0.5
    assert torch.equal(found < 0, bent.cpu() < 0)


def test_redistance_is_exact_for_planes_and_keeps_the_surface():
    points = lattice()
    normal = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    plane = (points @ normal)[..., None] - 0.0331
    found = ops.redistance(torch.sinh(plane), BOX)
    near = plane.abs() < 0.05
    near[:3] = near[-3:] = near[:, :, :3] = near[:, :, -3:] = False  # beside the faces, the nearest point is outside
    torch.testing.assert_close(found[near], plane[near], rtol=0, atol=2e-3)
    torch.testing.assert_close(ops.redistance(found, BOX)[near], found[near], rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bound", ["upper", "lower"])
def test_distances_are_the_same_whether_or_not_gradients_are_recorded_or_returned(device, dtype, bound):
    """Positions that are not finite read zeros and get no gradient."""
    grid, box = sphere(lattice()).to(device, dtype), BOX.to(device, dtype)
    points = 4 * torch.rand(3, 50, 3, device=device, dtype=dtype) - 2
    points[0, :4] = torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [0, 5, -math.inf], [1e30, 0, 0]])
    found = ops.sample_distance(grid, points, box, bound=bound)
    points.requires_grad_()
    recorded = ops.sample_distance(grid, points, box, bound=bound)
    value, given = ops.sample_distance(grid, points, box, bound=bound, with_gradient=True)
    torch.testing.assert_close((recorded, value), (found, found))
    slopes = [torch.autograd.grad(x.sum(), points)[0] for x in (recorded, value)]
    torch.testing.assert_close(slopes[0][:, 4:], given[:, 4:, 0])
    torch.testing.assert_close(slopes[1][:, 4:], given[:, 4:, 0])
    for result in (found, given, *slopes):
        assert not result[0, :3].any()


def test_redistance_finds_the_same_if_it_looks_for_nearer_surfaces_to_the_end(device, monkeypatch):
    grid = torch.rand(20, 30, 25, 1, device=device) - 0.001
    found = ops.redistance(grid, BOX.to(device))
    monkeypatch.setattr(distances, "_SHIFTS", 1000)
    assert torch.equal(found, ops.redistance(grid, BOX.to(device)))


def test_redistance_of_every_channel_and_element_by_itself():
    grids = torch.randn(2, 5, 6, 7, 3, dtype=torch.float64)
    found = ops.redistance(grids, BOX)
    for element, channel in ((0, 0), (1, 2)):
        alone = ops.redistance(grids[element, ..., channel : channel + 1].contiguous(), BOX)
        torch.testing.assert_close(found[element, ..., channel : channel + 1], alone)


def test_redistance_without_a_surface_and_of_unknown_values():
    assert ops.redistance(torch.ones(3, 1, 4, 1), BOX).eq(math.inf).all()
    assert ops.redistance(-torch.ones(1, 1, 1, 1), BOX).eq(-math.inf).all()
    # Twelve vertices are more than are searched between two looks at what is found.
    for shape in ((12, 12, 12, 0), (0, 12, 12, 12, 1)):
        assert ops.redistance(torch.ones(shape), BOX).shape == shape
    grid = lattice((5, 3, 3))[..., :1].contiguous() - 0.1
    grid[0] = math.nan
    found = ops.redistance(grid, BOX)
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], grid[1:])


def test_redistance_of_what_has_a_tangent_is_refused():
    with pytest.raises(NotImplementedError, match="redistance has no derivative in grid"):
        torch.func.jvp(lambda grid: ops.redistance(grid, BOX), (torch.randn(2, 2, 2, 1),), (torch.ones(2, 2, 2, 1),))
    assert not ops.redistance(torch.randn(2, 2, 2, 1, requires_grad=True), BOX).requires_grad


# --- depth images


def views(count=3, size=48):
    """Depths of the sphere along the axis, poses around it, and pinholes; infinity beside it."""
    poses, depths = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1), []
    pinholes = torch.tensor([60.0, 60.0, size / 2, size / 2], dtype=torch.float64).expand(count, 4)
    pixel = (torch.arange(size, dtype=torch.float64) + 0.5 - size / 2) / 60
    rays = torch.stack(torch.broadcast_tensors(pixel, -pixel[:, None], torch.tensor(-1.0).double()), dim=-1)
    for view in range(count):
        turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
        turn *= torch.linalg.det(turn)
        poses[view, :3, :3], poses[view, :3, 3] = turn, 2 * turn[:, 2]
        a, b, c = rays.square().sum(-1), 2 * rays[..., 2], 4 - 0.55**2
        inside = b.square() - a * c
        depths.append(torch.where(inside > 0, (-b - inside.clamp(min=0).sqrt()) / a, math.inf))
    return torch.stack(depths), poses, pinholes


def test_fused_distances_change_their_sign_at_the_surface_and_colours_stay(device):
    depths, poses, pinholes = (x.to(device) for x in views(24))
    colors = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, device=device).expand(*depths.shape, 3)
    fused = ops.integrate_depth(depths, poses, pinholes, BOX.to(device), (33, 25, 41), truncation=0.2, colors=colors)
    true = sphere(lattice()).to(device)
    seen = (fused.weights > 0) & (true.abs() > 0.03)  # a distance along a ray is longer, of the same sign
    assert ((fused.distances > 0) == (true > 0))[seen].double().mean() > 0.99
    torch.testing.assert_close(fused.distances[true > 0.4].nan_to_num(0.2), torch.full_like(true[true > 0.4], 0.2))
    assert fused.distances[fused.weights == 0].isnan().all()
    assert fused.weights[true < -0.45].eq(0).all()
    known = fused.color_weights[..., 0] > 0
    torch.testing.assert_close(fused.colors[known], colors[0, 0, 0].expand(int(known.sum()), 3))
    assert fused.colors[~known].isnan().all()


def test_images_one_after_another_are_images_at_once():
    depths, poses, pinholes = views(5)
    weights, colors = torch.rand_like(depths), torch.rand(*depths.shape, 2, dtype=torch.float64)
    options = {"truncation": 0.2}
    at_once = ops.integrate_depth(depths, poses, pinholes, BOX, 17, weights=weights, colors=colors, **options)
    fused = 17
    for part in (slice(0, 2), slice(2, 2), slice(2, 5)):
        given = {"weights": weights[part], "colors": colors[part], **options}
        fused = ops.integrate_depth(depths[part], poses[part], pinholes[part], BOX, fused, **given)
    torch.testing.assert_close(fused, at_once, equal_nan=True)
    with pytest.raises(ValueError, match="into must have colors of 0 channels, got 2"):
        ops.integrate_depth(depths, poses, pinholes, BOX, fused, **options)


def test_depths_along_rays_are_depths_along_the_axis_over_the_cosine():
    depths, poses, pinholes = views(2, size=200)
    pixel = (torch.arange(200, dtype=torch.float64) + 0.5 - 100) / 60
    lengths = (1 + pixel.square() + pixel[:, None].square()).sqrt()
    one = ops.integrate_depth(depths, poses, pinholes, BOX, 9, truncation=0.3)
    other = ops.integrate_depth(depths * lengths, poses, pinholes, BOX, 9, truncation=0.3, along="ray")
    torch.testing.assert_close(one.distances, other.distances, rtol=0, atol=4e-3, equal_nan=True)


def test_missing_depths_say_nothing_and_get_no_gradient():
    depths, poses, pinholes = views(1)
    depths[:] = torch.tensor([0.0, math.nan, -1.0, math.inf]).repeat(12)
    poses.requires_grad_()
    fused = ops.integrate_depth(depths[..., :3].repeat(1, 1, 16), poses, pinholes, BOX, 9, truncation=0.3)
    assert fused.weights.eq(0).all()
    fused = ops.integrate_depth(depths.requires_grad_(), poses, pinholes, BOX, 9, truncation=0.3)
    for gradient in torch.autograd.grad(fused.distances.nan_to_num(0.0).sum() + fused.weights.sum(), (depths, poses)):
        assert gradient.eq(0).all()


# --- marching cubes


def test_triangles_lie_on_the_surface_and_face_outwards():
    pytest.importorskip("skimage")
    grid = sphere(lattice())
    for inside, sign in (("below", 1), ("above", -1)):
        vertices, faces = ops.marching_cubes(sign * grid, BOX, inside=inside)
        assert sphere(vertices.double()).abs().max() < 5e-3
        first, second, third = vertices[faces].unbind(1)
        outwards = torch.linalg.cross(second - first, third - first)
        assert ((outwards * first).sum(dim=-1) > 0).all()
        assert len(vertices) - len(faces) // 2 == 2  # a closed sphere, by Euler


def test_triangles_of_nothing_and_beside_unknown_values():
    pytest.importorskip("skimage")
    for grid in (torch.ones(4, 4, 4), torch.ones(1, 1, 1, 1), torch.full((3, 3, 3), math.nan)):
        vertices, faces = ops.marching_cubes(grid, BOX)
        assert vertices.shape == faces.shape == (0, 3)
    grid = lattice((5, 5, 5))[..., :1].contiguous()
    whole = ops.marching_cubes(grid, BOX, level=0.1)[1]
    grid[:, 0] = math.nan
    assert 0 < len(ops.marching_cubes(grid, BOX, level=0.1)[1]) < len(whole)
