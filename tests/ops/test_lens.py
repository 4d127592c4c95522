"""Lenses against float64 references, there and back, and where a lens shows nothing."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch.nn import functional as F

from voxelfield.ops._internal import lens_points, lens_rays

FOX = [0.0578421, -0.0805099, 0.0, 0.0, -0.000980296, 0.00015575]
RADIUS = 1100.0  # pixels from the principal point to the outermost points
# Terms, whether a fisheye, and how far out the ideal points lie.
LENSES = {
    "none": ([0.0] * 6, False, 1.5),
    "fox": (FOX, False, 0.85),
    "barrel": ([-0.35, 0.15, -0.03, 0.0, 0.001, -0.002], False, 1.2),
    "barrel, near its fold": ([-0.3, 0.0, 0.0, 0.0, 0.0, 0.0], False, 1.04),
    "pincushion": ([0.5, 0.2, 0.1, 0.05, 0.01, -0.01], False, 0.9),
    "pincushion, whose image reaches beyond its fold": ([0.5, -0.2, 0.0, 0.0, 0.0, 0.0], False, 1.38),
    "decentred": ([-0.1, 0.0, 0.0, 0.0, 0.05, -0.04], False, 0.8),
    "equidistant": ([0.0] * 6, True, math.radians(170)),
    "fisheye": ([-0.04, 0.01, -0.005, 0.001, 0.0, 0.0], True, math.radians(80)),
    "strong fisheye": ([0.1, 0.05, 0.02, 0.01, 0.001, 0.001], True, math.radians(80)),
}
every_lens = pytest.mark.parametrize("lens", LENSES)


def make(lens, count=2000):
    """Ideal points all over the image, the centre included, and where a lens shows them; float64."""
    terms, fisheye, reach = LENSES[lens]
    terms = torch.tensor(terms).double()
    turn, radius = 2 * math.pi * torch.rand(count, dtype=torch.float64), reach * torch.rand(count).double().sqrt()
    ideal = radius[:, None] * torch.stack((turn.cos(), turn.sin()), dim=-1)
    ideal[0] = 0
    return ideal, reference.lens_points(ideal, terms), terms, fisheye


def in_pixels(errors, points):
    return float(errors.norm(dim=-1).max() / points.norm(dim=-1).max() * RADIUS)


@every_lens
def test_a_ray_is_the_one_that_the_reference_finds(device, lens):
    ideal, points, terms, fisheye = make(lens, 300)
    points = points.float()
    # Rounded points are other points: near a fold, their rays lie farther apart.
    ideal = reference.ideal_points(points.double(), terms)
    rays = lens_rays(points.to(device), terms[None].float().to(device), fisheye=fisheye).cpu().double()
    off = (F.normalize(rays, dim=-1) - reference.rays_of_ideal_points(ideal, fisheye)).norm(dim=-1)
    assert off.max() < (1e-5 if "fold" in lens else 1e-6)


@every_lens
def test_a_point_is_where_the_reference_puts_it(device, lens):
    ideal, points, terms, fisheye = make(lens)
    rays = 3 * reference.rays_of_ideal_points(ideal, fisheye)
    found = lens_points(rays.float().to(device), terms[None].float().to(device), fisheye=fisheye)
    assert in_pixels(found.cpu().double() - points, points) < 1e-3


@every_lens
def test_there_and_back_is_the_same_pixel(device, lens):
    _, points, terms, fisheye = make(lens)
    points, terms = points.float().to(device), terms[None].float().to(device)
    again = lens_points(lens_rays(points, terms, fisheye=fisheye), terms, fisheye=fisheye)
    assert in_pixels(again - points, points) < 1e-3


@pytest.mark.parametrize("fisheye", [False, True])
def test_each_point_has_its_own_lens(device, fisheye):
    points, terms = torch.rand(50, 2, device=device) - 0.5, 0.05 * torch.randn(50, 6, device=device)
    rays = lens_rays(points, terms, fisheye=fisheye)
    alone = [lens_rays(p[None], k[None], fisheye=fisheye) for p, k in zip(points, terms, strict=True)]
    assert torch.equal(rays, torch.cat(alone))
    back = [lens_points(r[None], k[None], fisheye=fisheye) for r, k in zip(rays, terms, strict=True)]
    assert torch.equal(lens_points(rays, terms, fisheye=fisheye), torch.cat(back))


@pytest.mark.parametrize(
    ("terms", "fisheye", "fold"),
    [
        ([-0.3, 0.0, 0.0, 0.0, 0.0, 0.0], False, math.atan(1 / math.sqrt(0.9))),
        ([0.5, -0.2, 0.0, 0.0, 0.0, 0.0], False, math.atan(math.sqrt(1.5 / 2 + math.sqrt(1.5**2 / 4 + 1)))),
        ([-0.1, 0.0, 0.0, 0.0, 0.0, 0.0], True, 1 / math.sqrt(0.3)),
        ([0.0] * 6, True, math.pi),
    ],
)
def test_points_beyond_the_fold_have_rays_at_the_fold(device, terms, fisheye, fold):
    outwards = F.normalize(torch.randn(200, 2, device=device), dim=-1)
    points = outwards * torch.linspace(3.5, 80, 200, device=device)[:, None]
    right, down, forward = lens_rays(points, torch.tensor([terms], device=device), fisheye=fisheye).unbind(-1)
    angle = torch.atan2(torch.hypot(right, down), forward)
    torch.testing.assert_close(angle, torch.full_like(angle, fold), atol=2e-3, rtol=0)
    if fold < math.pi:
        assert (outwards[:, 0] * down - outwards[:, 1] * right).abs().max() < 1e-5, "another direction off the axis"


@pytest.mark.parametrize("fisheye", [False, True])
def test_any_lens_and_any_point_have_a_ray(device, fisheye):
    points = torch.randn(20000, 2, device=device) * torch.logspace(-6, 6, 20000, device=device)[:, None]
    rays = lens_rays(points, torch.randn(20000, 6, device=device), fisheye=fisheye)
    assert rays.isfinite().all()
    assert (rays.norm(dim=-1) > 0.99).all()


@pytest.mark.parametrize("op", ["lens_rays", "lens_points"])
def test_opcheck(device, op):
    call = {"lens_rays": lens_rays, "lens_points": lens_points}[op]
    given = torch.rand(7, 2 if op == "lens_rays" else 3, device=device)
    for lens in (torch.rand(7, 6, device=device), torch.rand(1, 6, device=device)):
        call(given, lens)  # loads the extension
        torch.library.opcheck(getattr(torch.ops.voxelfield, op).default, (given, lens, True))


def test_no_points(device):
    lens = torch.zeros(1, 6, device=device)
    assert lens_rays(torch.zeros(0, 2, device=device), lens).shape == (0, 3)
    assert lens_points(torch.zeros(0, 3, device=device), lens[:0]).shape == (0, 2)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"points must have shape \(N, 2\), got \(4, 3\)"):
        lens_rays(torch.zeros(4, 3), torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"rays must have shape \(N, 3\), got \(4, 2\)"):
        lens_points(torch.zeros(4, 2), torch.zeros(1, 6))
    for shape in ((4, 4), (3, 6), (6,)):
        with pytest.raises(ValueError, match=r"lens must have shape \(4, 6\), got"):
            lens_rays(torch.zeros(4, 2), torch.zeros(shape))
    with pytest.raises(TypeError, match="lens must be float32, got float64"):
        lens_rays(torch.zeros(4, 2), torch.zeros(1, 6).double())
