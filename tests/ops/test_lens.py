"""Lenses against float64 references, there and back, and where a lens shows nothing."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch.nn import functional as F

from voxelfield import Lens
from voxelfield.foundation import constants
from voxelfield.ops._internal.cameras import LENS_NUMBERS, lens_points, lens_rays, sphere_points, sphere_rays
from voxelfield.rendering.lens import LENS_TERMS

RADIUS = 1100.0  # pixels from the principal point to the outermost points
FOX = {"k1": 0.0578421, "k2": -0.0805099, "p1": -0.000980296, "p2": 0.00015575}
PRISM = {"s1": 0.01, "s2": -0.004, "s3": -0.008, "s4": 0.003}
RATIONAL = {"k1": 0.4, "k2": 0.1, "k3": 0.01, "k4": 0.5, "k5": 0.12, "k6": 0.012, "p1": 0.003, "p2": -0.002}
AROUND = {"k1": 0.05, "k2": -0.02, "k3": 0.01, "k4": -0.004, "k5": 0.002, "k6": -0.0003, "p1": 0.01, "p2": -0.02}
# Model, terms, and the largest angle from the axis.
LENSES = {
    "none": ("pinhole", {}, math.atan(1.5)),
    "fox": ("perspective", FOX, math.atan(0.85)),
    "barrel": ("perspective", {"k1": -0.35, "k2": 0.15, "k3": -0.03, "p1": 0.001, "p2": -0.002}, math.atan(1.2)),
    "barrel, near its fold": ("perspective", {"k1": -0.3}, math.atan(1.04)),
    "pincushion": (
        "perspective",
        {"k1": 0.5, "k2": 0.2, "k3": 0.1, "k4": 0.05, "p1": 0.01, "p2": -0.01},
        math.atan(0.9),
    ),
    "pincushion, whose image reaches beyond its fold": ("perspective", {"k1": 0.5, "k2": -0.2}, math.atan(1.38)),
    "decentred": ("perspective", {"k1": -0.1, "p1": 0.05, "p2": -0.04}, math.atan(0.8)),
    "perspective, with a prism": ("perspective", FOX | PRISM, math.atan(0.85)),
    "rational": ("rational", RATIONAL, math.radians(70)),
    "rational, with a prism": ("rational", RATIONAL | PRISM, math.radians(60)),
    "rational, with a pole": ("rational", {"k1": -0.2, "k4": -0.5}, math.atan(1.2)),
    "equidistant": ("fisheye", {}, math.radians(170)),
    "fisheye": ("fisheye", {"k1": -0.04, "k2": 0.01, "k3": -0.005, "k4": 0.001}, math.radians(80)),
    "strong fisheye": (
        "fisheye",
        {"k1": 0.1, "k2": 0.05, "k3": 0.02, "k4": 0.01, "p1": 0.001, "p2": 0.001},
        math.radians(80),
    ),
    "fisheye, with a prism": ("fisheye", {"k1": -0.04, "k2": 0.01, "p1": 0.01, "p2": -0.02} | PRISM, math.radians(80)),
    "fisheye of 6 + 2 + 4 terms": ("fisheye624", AROUND | PRISM, math.radians(75)),
    "field of view": ("field_of_view", {"omega": 1.2}, math.radians(89)),
    "field of view, the other way": ("field_of_view", {"omega": -0.3}, math.radians(80)),
    "division": ("division", {"k": -0.4}, math.radians(120)),
    "division, near its fold": ("division", {"k": 0.25}, math.atan(0.99)),
    "extended unified": ("extended_unified", {"alpha": 0.6, "beta": 1.1}, math.radians(100)),
    "half a sphere": ("extended_unified", {"alpha": 1.0, "beta": 1.0}, math.radians(80)),
}
every_lens = pytest.mark.parametrize("lens", LENSES)


def make_rows(model, terms):
    return Lens(model, torch.tensor([[terms.get(term, 0.0) for term in LENS_TERMS[model]]])).rows


def make(lens, count=2000):
    """Rays in all directions within a lens, the axis included, where it images them, and its row; float64."""
    model, terms, reach = LENSES[lens]
    turn, angle = 2 * math.pi * torch.rand(count, dtype=torch.float64), reach * torch.rand(count).double().sqrt()
    angles = angle[:, None] * torch.stack((turn.cos(), turn.sin()), dim=-1)
    angles[0] = 0
    rays = reference.ray_at_angle(angles)
    return rays, reference.lens_points(rays, model, terms), make_rows(model, terms)


def in_pixels(errors, points):
    return float(errors.norm(dim=-1).max() / points.norm(dim=-1).max() * RADIUS)


@every_lens
def test_a_ray_is_the_one_that_the_reference_finds(device, lens):
    model, terms, _ = LENSES[lens]
    _, points, row = make(lens, 300)
    points = points.float()
    # Rounded points are other points: near a fold, their rays lie farther apart.
    expected = reference.lens_rays(points.double(), model, terms)
    rays = lens_rays(points.to(device), row.to(device)).cpu().double()
    off = (F.normalize(rays, dim=-1) - expected).norm(dim=-1)
    assert off.max() < (1e-5 if "fold" in lens else 1e-6)


@every_lens
def test_a_point_is_where_the_reference_puts_it(device, lens):
    rays, points, row = make(lens)
    found = lens_points((3 * rays).float().to(device), row.to(device))
    assert in_pixels(found.cpu().double() - points, points) < 1e-3


def test_each_point_has_its_own_lens(device):
    rows = torch.cat([make_rows(model, terms) for model, terms, _ in LENSES.values()]).to(device)
    points = torch.rand(len(rows), 2, device=device) - 0.5
    rays = lens_rays(points, rows)
    alone = [lens_rays(p[None], k[None]) for p, k in zip(points, rows, strict=True)]
    assert torch.equal(rays, torch.cat(alone))
    back = [lens_points(r[None], k[None]) for r, k in zip(rays, rows, strict=True)]
    assert torch.equal(lens_points(rays, rows), torch.cat(back))


@pytest.mark.parametrize(
    ("model", "terms", "nearest", "fold"),
    [
        ("perspective", {"k1": -0.3}, 3.5, math.atan(1 / math.sqrt(0.9))),
        ("perspective", {"k1": 0.5, "k2": -0.2}, 3.5, math.atan(math.sqrt(1.5 / 2 + math.sqrt(1.5**2 / 4 + 1)))),
        # These grow again beyond their fold, but no image is formed there.
        ("perspective", {"k1": -0.5, "k2": 0.1}, 0.61, math.atan(1.0)),
        ("fisheye", {"k1": -0.5, "k2": 0.1}, 0.61, 1.0),
        ("fisheye624", {"k1": -0.5, "k2": 0.1}, 0.61, 1.0),
        ("rational", {"k1": -0.5, "k2": 0.1}, 0.61, math.atan(1.0)),
        ("rational", {"k4": 0.25}, 1.01, math.atan(2.0)),
        ("fisheye", {"k1": -0.1}, 3.5, 1 / math.sqrt(0.3)),
        ("fisheye", {}, 3.5, math.pi),
        ("field_of_view", {"omega": 1.2}, 1.4, math.pi / 2),
        ("division", {"k": 0.25}, 2.01, math.atan(1.0)),
        ("extended_unified", {"alpha": 0.75, "beta": 1.0}, 1.5, math.pi / 2 + math.asin(1 / 3)),
        ("extended_unified", {"alpha": 1.0, "beta": 1.0}, 1.1, math.pi / 2),
    ],
)
def test_points_beyond_the_fold_have_rays_at_the_fold(device, model, terms, nearest, fold):
    outwards = F.normalize(torch.randn(200, 2, device=device), dim=-1)
    points = outwards * torch.linspace(nearest, 80, 200, device=device)[:, None]
    right, down, forward = lens_rays(points, make_rows(model, terms).to(device)).unbind(-1)
    angle = torch.atan2(torch.hypot(right, down), forward)
    torch.testing.assert_close(angle, torch.full_like(angle, fold), atol=2e-3, rtol=0)
    if fold < math.pi:
        assert (outwards[:, 0] * down - outwards[:, 1] * right).abs().max() < 1e-5, "another direction off the axis"


@pytest.mark.parametrize("model", LENS_TERMS)
def test_any_lens_and_any_point_have_a_ray(device, model):
    count = 300
    points = torch.randn(count, 2, device=device) * torch.logspace(-6, 6, count, device=device)[:, None]
    coefficients = torch.randn(count, len(LENS_TERMS[model]))
    if model in ("field_of_view", "extended_unified"):
        coefficients = coefficients.abs().clamp(1e-3, 1)
    rays = lens_rays(points, Lens(model, coefficients).rows.to(device))
    assert rays.isfinite().all()
    assert (rays.norm(dim=-1) > 1e-4).all()


def test_the_kernels_have_the_same_models():
    assert LENS_NUMBERS == constants.LENS_NUMBERS == 2 + max(map(len, LENS_TERMS.values()))
    *known, last = LENS_TERMS
    assert len(known) == constants.LENS_MODELS
    assert last == "equirectangular", "whose rays torch computes"


def test_panoramas_there_and_back(device):
    for right, down in ((0.3, -0.2), (3.1, 1.5), (-3.1, -1.5), (1.6, 0.0)):
        ray = sphere_rays(torch.tensor([right, down], device=device)).tolist()
        expected = (math.sin(right) * math.cos(down), math.sin(down), math.cos(right) * math.cos(down))
        assert ray == pytest.approx(expected, abs=1e-6)
    points = (torch.rand(1000, 2, device=device) - 0.5) * torch.tensor([2 * math.pi, math.pi], device=device)
    torch.testing.assert_close(sphere_points(7 * sphere_rays(points)), points, atol=1e-4, rtol=0)
    beyond = sphere_rays(torch.tensor([[2.0, 9.0], [-1.0, -1.6]], device=device))
    torch.testing.assert_close(beyond[:, 1], torch.tensor([1.0, -1.0], device=device))


def test_panoramas_have_derivatives_also_at_the_poles():
    rays = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sphere_points, rays)
    pole = torch.tensor([[0.0, 2.0, 0.0], [0.0, -1.0, 0.0]], requires_grad=True)
    sphere_points(pole).sum().backward()
    assert pole.grad.isfinite().all()
