"""Cameras: rays against an independent float64 projection, and the orbit."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import reference
import torch
from camera_poses import looking_at, random_rotations
from op_testing import never_synchronising

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import LENS_TERMS, Lens
from voxelfield.rendering.paths import orbit

AABB = torch.tensor([[-1.5, -1.5, -1.5], [1.5, 1.5, 1.5]])


def random_rotation(generator):
    q, r = np.linalg.qr(generator.standard_normal((3, 3)))
    q = q * np.sign(np.diag(r))
    q[:, 0] *= np.linalg.det(q)
    return q


def make_cameras(count=6, width=64, height=48, device="cpu"):
    generator = np.random.default_rng(1)
    c2w = np.tile(np.eye(4), (count, 1, 1))
    for pose in c2w:
        pose[:3, :3] = random_rotation(generator)
        pose[:3, 3] = generator.uniform(-2, 2, 3)
    intrinsics = generator.uniform((40, 40, 25, 15), (80, 80, 40, 30), (count, 4))
    return Cameras(torch.tensor(c2w).float(), torch.tensor(intrinsics).float(), width, height).to(device)


def some_rays(cameras):
    """Indices of cameras, pixels, and the rays through these."""
    device = cameras.c2w.device
    camera_index = torch.randint(len(cameras), (200,), device=device)
    pixels = torch.rand(200, 2, device=device) * torch.tensor([64.0, 48.0], device=device)
    return camera_index, pixels, cameras.rays(camera_index, pixels, AABB.to(device))


def project(cameras, camera_index, points):
    """Projects world points to pixels through the inverse pose in float64: the opposite way to Cameras.rays."""
    pixels, depths = [], []
    for camera, point in zip(camera_index.tolist(), points.double().cpu().numpy(), strict=True):
        w2c = np.linalg.inv(cameras.c2w[camera].double().cpu().numpy())
        fx, fy, cx, cy = cameras.intrinsics[camera].double().cpu().numpy()
        x, y, z = (w2c @ np.append(point, 1.0))[:3]
        pixels.append((cx + fx * x / -z, cy - fy * y / -z))
        depths.append(-z)
    return torch.tensor(np.array(pixels)), torch.tensor(np.array(depths))


def test_points_on_rays_project_back_to_their_pixels(device):
    cameras = make_cameras(device=device)
    camera_index, pixels, rays = some_rays(cameras)
    for t in (0.5, 3.0):
        found, depth = project(cameras, camera_index, rays.origins + t * rays.directions)
        assert (depth > 0).all(), "the ray runs behind its camera"
        torch.testing.assert_close(found, pixels.double().cpu(), rtol=0, atol=1e-3)


def with_lens(cameras, model):
    """A lens of its own for each camera."""
    models = [model] * len(cameras) if isinstance(model, str) else model
    columns = min(len(LENS_TERMS[each]) for each in models)
    return dataclasses.replace(
        cameras, lens=Lens(models, 0.03 * torch.randn(len(cameras), columns).to(cameras.c2w.device))
    )


MIXED = ("perspective", "fisheye", "rational", "fisheye624", "fisheye", "perspective")


@pytest.mark.parametrize("model", ["perspective", "fisheye", MIXED], ids=str)
def test_rays_through_a_lens_are_seen_at_their_pixels(device, model):
    cameras = with_lens(make_cameras(device=device), model)
    camera_index, pixels, rays = some_rays(cameras)
    torch.testing.assert_close(rays.directions.norm(dim=-1), torch.ones(200, device=device))
    for camera, direction, pixel in zip(camera_index.tolist(), rays.directions, pixels, strict=True):
        x, y, z = (cameras.c2w[camera, :3, :3].mT.double() @ direction.double()).cpu()
        at = reference.lens_points(torch.stack((x, -y, -z))[None], *cameras.lens.described(camera))[0]
        fx, fy, cx, cy = cameras.intrinsics[camera].cpu().double()
        found = torch.stack((cx + fx * at[0], cy + fy * at[1]))
        torch.testing.assert_close(found, pixel.cpu().double(), rtol=0, atol=1e-3)


def test_a_sphere_shows_all_directions_in_order(device):
    """Rows from the zenith down, columns from behind over the left to the right, of a camera that looks along -z."""
    lens, focal = Lens("equirectangular", torch.zeros(1, 0)), 4 / math.pi
    camera = Cameras(torch.eye(4)[None], torch.tensor([[focal, focal, 4.0, 2.0]]), 8, 4, lens).to(device)
    directions = camera.image_rays(0, AABB.to(device)).directions.view(4, 8, 3)
    for row in range(4):
        for column in range(8):
            right, up = math.radians(45 * (column + 0.5) - 180), math.radians(90 - 45 * (row + 0.5))
            flat = math.cos(up)
            expected = [flat * math.sin(right), math.sin(up), -flat * math.cos(right)]
            assert directions[row, column].tolist() == pytest.approx(expected, abs=1e-6)


def with_motion(cameras, turn=0.2, move=0.5):
    """Random motions of all rows together; the middle row has the pose."""
    axes = torch.nn.functional.normalize(torch.randn(len(cameras), 2, 3), dim=-1) * torch.tensor([[turn], [move]])
    rolling = torch.cat((axes.flatten(1) / cameras.height, torch.full((len(cameras), 1), cameras.height / 2)), dim=1)
    return dataclasses.replace(cameras, rolling=rolling.to(cameras.c2w.device))


@pytest.mark.parametrize("model", [None, "fisheye", "equirectangular"])
def test_each_row_has_its_own_pose(device, model):
    cameras = make_cameras(device=device)
    cameras = with_motion(cameras if model is None else with_lens(cameras, model))
    for camera in (0, 3):
        rays = cameras.image_rays(camera, AABB.to(device))
        origins, directions = (each.view(48, 64, 3).cpu() for each in (rays.origins, rays.directions))
        turn, move, _ = cameras.rolling[camera].double().cpu().split((3, 3, 1))
        x, y, z = turn.tolist()
        cross = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
        for row in (0, 17, 47):
            relative = torch.eye(4, dtype=torch.float64)
            relative[:3, :3] = torch.linalg.matrix_exp((row + 0.5 - 24) * cross)
            relative[:3, 3] = (row + 0.5 - 24) * move
            pose = cameras.c2w[camera].double().cpu() @ relative
            still = dataclasses.replace(cameras[[camera]], c2w=pose[None].float().to(device), rolling=None)
            expected = still.image_rays(0, AABB.to(device))
            torch.testing.assert_close(origins[row], expected.origins[:64].cpu(), atol=1e-5, rtol=0)
            expected_directions = expected.directions.view(48, 64, 3)[row].cpu()
            torch.testing.assert_close(directions[row], expected_directions, atol=1e-5, rtol=0)


def test_rows_keep_their_poses_at_other_sizes(device):
    cameras, aabb = with_motion(make_cameras(height=50, device=device)), AABB.to(device)
    pixel, index = torch.tensor([[31.5, 40.5]], device=device), torch.tensor([2], device=device)
    whole = cameras.rays(index, pixel, aabb)
    # Seven rows of seven pixels, and one that is cut off: its fourth row is exposed with that in its middle.
    for other, point in ((cameras.enlarged(5), 5 * pixel), (cameras.shrunk(7), pixel / 7 + 0.0), (cameras[[2]], pixel)):
        first = index if len(other) > 1 else 0 * index
        found = other.rays(first, point, aabb)
        near = 0.5 * cameras.rolling[2, :6].view(2, 3).norm(dim=1) * (7 if other.height == 7 else 0) + 1e-5
        assert (found.directions - whole.directions).norm() < near[0]
        assert (found.origins - whole.origins).norm() < near[1]
    assert cameras.kinds == "rolling shutter"
    assert orbit(cameras, torch.zeros(3, device=device), 4).rolling is None


def test_poses_are_differentiable_through_a_rolling_shutter():
    cameras = with_motion(make_cameras(count=2))
    rolling, index, y = cameras.rolling.double(), torch.tensor([0, 1, 1]), torch.tensor([3.5, 7.5, 40.5])

    def rows(c2w):
        moving = object.__new__(Cameras)
        for name, value in (vars(cameras) | {"c2w": c2w, "rolling": rolling}).items():
            object.__setattr__(moving, name, value)
        return moving.row_poses(index, y.double())

    assert torch.autograd.gradcheck(rows, cameras.c2w.double().requires_grad_())


def test_a_cube_shows_what_a_sphere_does(device):
    lens = Lens(["equirectangular", "fisheye"], torch.zeros(2, 0))
    cameras = dataclasses.replace(make_cameras(count=2, device=device), lens=lens.to(device))
    cube = cameras.pinholes(all_round=True)
    assert (len(cube), cube.lens, cube.values) == (7, None, {})
    assert torch.equal(cube.c2w[:1], cameras.c2w[:1])
    side = 2 * round(float(cameras.intrinsics[0, 0]))
    assert [cube.size(index) for index in range(7)] == 6 * [(side, side)] + [(64, 48)]
    torch.testing.assert_close(cube.c2w[:6, :3, 3], cameras.c2w[:1, :3, 3].expand(6, 3))
    torch.testing.assert_close(torch.linalg.det(cube.c2w[:, :3, :3]), torch.ones(7, device=device))
    torch.testing.assert_close(cube.c2w[:6, :3, 2].sum(dim=0), torch.zeros(3, device=device))
    # The second face is to the right of the first, and the fifth above it.
    right, up = cameras.c2w[0, :3, 0], cameras.c2w[0, :3, 1]
    torch.testing.assert_close(-cube.c2w[1, :3, 2], right)
    torch.testing.assert_close(-cube.c2w[4, :3, 2], up)
    assert len(cameras.pinholes()) == 2


def test_a_lens_without_terms_is_a_pinhole(device):
    cameras = make_cameras(device=device)
    models = ("perspective", "rational", "field_of_view", "division", "extended_unified", "pinhole")
    nothing = torch.tensor([0.0, 1.0], device=device) * torch.eye(6, device=device)[4][:, None]
    bare = dataclasses.replace(cameras, lens=Lens(models, nothing))
    assert bare.lens.models == ("pinhole",) * 6
    plain, bent = (each.image_rays(1, AABB.to(device)) for each in (cameras, bare))
    torch.testing.assert_close(plain.directions, bent.directions)


def test_a_lens_belongs_to_its_camera(device):
    cameras = with_lens(make_cameras(device=device), MIXED)
    chosen = cameras[[4, 0]]
    assert torch.equal(chosen.lens.rows, cameras.lens.rows[[4, 0]])
    assert chosen.lens.models == ("fisheye", "perspective")
    assert cameras.to("cpu").lens.rows.device.type == "cpu"
    pixel, aabb = torch.tensor([[50.0, 10.0]], device=device), AABB.to(device)
    whole = cameras.rays(torch.tensor([4], device=device), pixel, aabb)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    assert torch.equal(chosen.rays(first, pixel, aabb).directions, whole.directions)
    large = chosen.enlarged(3).rays(first, 3 * pixel, aabb)
    torch.testing.assert_close(large.directions, whole.directions)
    assert orbit(cameras, torch.zeros(3, device=device), 4).lens is None


def test_poses_are_differentiable_through_a_lens():
    cameras = with_lens(make_cameras(), "perspective")
    c2w = cameras.c2w.clone().requires_grad_()
    rays = dataclasses.replace(cameras, c2w=c2w).image_rays(0, AABB)
    rays.directions[:, 0].sum().backward()
    assert c2w.grad[0, :3, :3].abs().min() > 0


@pytest.mark.parametrize(("model", "spread"), [(None, 1e-3), ("perspective", 0.1), ("fisheye", 0.1)])
def test_angles_of_pixels_bound_those_between_their_rays(device, model, spread):
    cameras = make_cameras(device=device)
    cameras = cameras if model is None else with_lens(cameras, model)
    for index, (smallest, largest) in enumerate(cameras.pixel_angles().tolist()):
        directions = cameras.image_rays(index, AABB.to(device)).directions.view(48, 64, 3)
        steps = torch.cat([directions.diff(dim=axis).norm(dim=-1).flatten() for axis in (0, 1)])
        assert smallest * 0.99 < steps.min()
        assert steps.max() < largest * 1.01
        focal = cameras.intrinsics[index, :2]
        if model is None:
            assert largest == pytest.approx(float(1 / focal.min()), rel=1e-2)


@pytest.mark.parametrize(
    ("model", "terms", "error", "message"),
    [
        ("lomo", torch.zeros(1, 6), ValueError, "model must be one of .*, got 'lomo'"),
        (None, torch.zeros(1, 6), ValueError, "model must be one of .*, got None"),
        (["fisheye", 3], torch.zeros(2, 6), ValueError, "model must be one of .*, got 3"),
        (["fisheye"], torch.zeros(2, 6), ValueError, "model must be .* one for each of 2 rows of coefficients, got 1"),
        ("fisheye", torch.zeros(4), ValueError, r"coefficients must have shape \(N, C\), got \(4,\)"),
        ("rational", torch.zeros(1, 13), ValueError, "coefficients must have at most 12 columns, got 13"),
        ("pinhole", torch.ones(1, 1), ValueError, "coefficients of a pinhole must be zero but for none, got"),
        ("division", torch.ones(1, 2), ValueError, "coefficients of a division must be zero but for k, got"),
        ("field_of_view", torch.full((1, 1), 3.2), ValueError, "omega must be between -pi and pi, got 3.2"),
        ("extended_unified", torch.tensor([[1.1, 1.0]]), ValueError, r"alpha must be in \[0, 1\] and beta above 0"),
        ("extended_unified", torch.tensor([[0.5]]), ValueError, r"alpha must be in \[0, 1\] and beta above 0"),
        ("fisheye", torch.zeros(1, 6).double(), TypeError, "coefficients must be float32, got float64"),
        ("perspective", torch.full((1, 6), torch.nan), ValueError, "coefficients must be finite, got"),
    ],
)
def test_a_lens_refuses_wrong_fields(model, terms, error, message):
    with pytest.raises(error, match=message):
        Lens(model, terms)


def test_a_lens_needs_coefficients_with_values():
    with pytest.raises(ValueError, match=r"Lens\.coefficients must have values"):
        Lens("perspective", torch.zeros(1, 6, device="meta"))


def test_rays_are_unit_and_start_at_the_camera(device):
    cameras = make_cameras(device=device)
    camera_index, _, rays = some_rays(cameras)
    torch.testing.assert_close(rays.directions.norm(dim=-1), torch.ones(200, device=device))
    assert torch.equal(rays.origins, cameras.c2w[camera_index, :3, 3])
    assert rays.origins.is_contiguous()


def test_image_rays_go_row_by_row(device):
    cameras = make_cameras(device=device)
    rays = cameras.image_rays(2, AABB.to(device))
    assert len(rays) == 64 * 48
    row, column = 7, 30
    single = cameras.rays(
        torch.tensor([2], device=device), torch.tensor([[column + 0.5, row + 0.5]], device=device), AABB.to(device)
    )
    at = row * 64 + column
    torch.testing.assert_close(rays.directions[at : at + 1], single.directions)
    torch.testing.assert_close(rays.far[at : at + 1], single.far)


@pytest.mark.parametrize("factor", [1, 3])
def test_enlarged_images_show_the_same_in_more_pixels(device, factor):
    cameras = make_cameras(device=device)
    large = cameras.enlarged(factor)
    assert (large.width, large.height) == (64 * factor, 48 * factor)
    camera_index, pixels, rays = some_rays(cameras)
    found, _ = project(large, camera_index, rays.origins + 2 * rays.directions)
    torch.testing.assert_close(found, factor * pixels.double().cpu(), rtol=0, atol=1e-3 * factor)


@pytest.mark.parametrize("across", [1, 2, 3])
def test_rays_of_a_pixel_share_no_row_and_no_column(device, across):
    cameras, aabb = make_cameras(device=device), torch.tensor([[-1.0] * 3, [1.0] * 3], device=device)
    divided = dataclasses.replace(cameras.enlarged(across), across=across)
    rays = divided.image_rays(1, aabb, slice(8 * across, 9 * across), slice(5 * across, 6 * across))
    pixels, _ = project(cameras, torch.ones(across**2, dtype=torch.int64), rays.origins + 2 * rays.directions)
    within = (pixels.cpu() - torch.tensor([5, 8])) * across**2
    expected = torch.arange(across**2) + 0.5
    for axis in (0, 1):
        torch.testing.assert_close(within[:, axis].sort().values.float(), expected, rtol=0, atol=0.02)
    parts = (within / across).long()
    assert parts.tolist() == [[column, row] for row in range(across) for column in range(across)]


def test_what_rays_a_pixel_has_is_checked_and_ends_where_images_are_resized():
    divided = dataclasses.replace(make_cameras(), across=2)
    assert divided.to("cpu").across == divided[[1]].across == 2
    assert divided.enlarged(3).across == divided.shrunk(2).across == 1
    with pytest.raises(ValueError, match=r"^Cameras\.across must be an int of at least 1, got 0$"):
        dataclasses.replace(divided, across=0)


def test_images_are_enlarged_by_whole_factors_of_numpy():
    cameras = make_cameras()
    assert cameras.enlarged(np.int64(2)).width == 2 * cameras.width


@pytest.mark.parametrize("factor", [0, 1.5, True, np.int64(0)], ids=repr)
def test_images_are_enlarged_by_whole_factors(factor):
    with pytest.raises(ValueError, match=f"factor must be an int of at least 1, got {factor}"):
        make_cameras().enlarged(factor)


def test_images_may_differ_in_size(device):
    sizes = torch.tensor([[6, 4], [3, 8], [6, 4], [5, 5], [1, 1], [2, 3]])
    cameras = dataclasses.replace(make_cameras(width=6, height=8), sizes=sizes).to(device)
    assert [cameras.size(index) for index in range(6)] == [tuple(size) for size in sizes.tolist()]
    for index, (width, height) in enumerate(sizes.tolist()):
        alone = Cameras(cameras.c2w[[index]], cameras.intrinsics[[index]], width, height)
        chosen = cameras[[index]]
        assert (chosen.width, chosen.height, chosen.sizes) == (width, height, None)
        rays, expected = cameras.image_rays(index, AABB.to(device)), alone.image_rays(0, AABB.to(device))
        torch.testing.assert_close(rays.directions, expected.directions)
        torch.testing.assert_close(cameras.pixel_angles()[index], alone.pixel_angles()[0])
    pair = cameras[torch.tensor([0, 1], device=device)]
    assert (pair.width, pair.height, pair.sizes.tolist()) == (6, 8, [[6, 4], [3, 8]])
    assert cameras[[0, 2]].sizes is None
    assert pair.enlarged(3).sizes.tolist() == [[18, 12], [9, 24]]
    assert (pair.shrunk(3).width, pair.shrunk(3).height, pair.shrunk(3).sizes.tolist()) == (2, 2, [[2, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"factor must be an int in \[1, 3\], the shorter side in pixels, got 4"):
        pair.shrunk(4)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (torch.ones(5, 2, dtype=torch.int64), ValueError, r"Cameras.sizes must have shape \(6, 2\)"),
        (torch.full((6, 2), 48), ValueError, r"at most 64 x 48, which one image each must reach"),
        (torch.tensor([[64, 48]] * 5 + [[0, 5]]), ValueError, r"Cameras.sizes must be at least 1"),
        (torch.full((6, 2), 48.0), TypeError, r"Cameras.sizes must be int64"),
    ],
)
def test_sizes_of_images_are_checked(sizes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(make_cameras(), sizes=sizes)


def test_no_rays(device):
    cameras = make_cameras(device=device)
    rays = cameras.rays(
        torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, 2, device=device), AABB.to(device)
    )
    assert len(rays) == 0


@pytest.mark.cuda
def test_casting_rays_never_waits_for_the_device():
    cameras = make_cameras(device="cuda")
    camera_index = torch.randint(len(cameras), (64,), device="cuda")
    pixels, aabb = torch.rand(64, 2, device="cuda"), AABB.cuda()
    for each in (cameras, with_motion(with_lens(cameras, "equirectangular"))):
        with never_synchronising():
            each.rays(camera_index, pixels, aabb)
            each.image_rays(0, aabb)


@pytest.mark.parametrize("index", [slice(1, 3), [4, 0], torch.tensor([5, 5])])
def test_cameras_are_indexed_together(index):
    cameras = make_cameras()
    chosen = cameras[index]
    assert len(chosen) == 2
    assert torch.equal(chosen.c2w, cameras.c2w[index])
    assert torch.equal(chosen.intrinsics, cameras.intrinsics[index])
    assert (chosen.width, chosen.height) == (64, 48)


def test_cameras_indexed_by_an_empty_list_are_empty():
    assert len(make_cameras()[[]]) == 0


def test_cameras_refuse_an_int_index():
    expected = r"index must be a slice, a sequence or a tensor, got the int 2: use cameras\[2:3\]"
    with pytest.raises(TypeError, match=expected):
        make_cameras()[2]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"c2w": torch.eye(4)}, ValueError, r"c2w must have shape \(N, 4, 4\), got \(4, 4\)"),
        ({"c2w": torch.zeros(2, 3, 4)}, ValueError, r"c2w must have shape .*, got \(2, 3, 4\)"),
        ({"c2w": torch.eye(4)[None].double()}, TypeError, r"c2w must be float32, got float64"),
        ({"c2w": [[1.0]]}, TypeError, r"c2w must be a torch.Tensor, got list"),
        ({"intrinsics": torch.zeros(2, 4)}, ValueError, r"intrinsics must have shape \(1, 4\), got \(2, 4\)"),
        (
            {"intrinsics": torch.zeros(1, 4, device="meta")},
            ValueError,
            r"intrinsics must be on the device of [\w.]+, cpu, but it is on meta",
        ),
        ({"width": 0}, ValueError, r"width must be an int of at least 1, got 0"),
        ({"height": 4.0}, ValueError, r"height must be an int of at least 1, got 4.0"),
        ({"lens": torch.zeros(1, 6)}, TypeError, r"lens must be a Lens or None, got Tensor"),
        ({"lens": Lens("fisheye", torch.zeros(2, 6))}, ValueError, "lens must be a Lens of 1 cameras, got one of 2"),
    ],
)
def test_cameras_refuse_wrong_fields(changes, error, message):
    good = {"c2w": torch.eye(4)[None], "intrinsics": torch.ones(1, 4), "width": 4, "height": 4}
    Cameras(**good)
    with pytest.raises(error, match=message):
        Cameras(**{**good, **changes})


@pytest.mark.parametrize(("chunk", "every"), [(7, 1), (1000, 1), (10, 3), (1000, 100)])
def test_chunks_of_an_image_are_its_rays_in_order(chunk, every):
    cameras = make_cameras()
    whole, (width, height) = cameras.image_rays(0, AABB), cameras.size(0)
    parts = list(cameras.image_chunks(0, AABB, chunk, every))
    assert max(map(len, parts)) <= chunk
    first_row, first_column = min(every, height) // 2, min(every, width) // 2
    expected = whole.directions.view(height, width, 3)[first_row::every, first_column::every].reshape(-1, 3)
    assert torch.equal(torch.cat([part.directions for part in parts]), expected)


def test_rays_refuse_wrong_arguments():
    cameras = make_cameras()
    index, pixels = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2)
    with pytest.raises(TypeError, match=r"camera_index must be int64, got int32"):
        cameras.rays(index.int(), pixels, AABB)
    with pytest.raises(ValueError, match=r"camera_index must have shape .*, got \(3, 1\)"):
        cameras.rays(index[:, None], pixels, AABB)
    with pytest.raises(TypeError, match=r"pixels must be float32, got int64"):
        cameras.rays(index, pixels.long(), AABB)
    with pytest.raises(ValueError, match=r"pixels must have shape \(3, 2\), got \(2, 2\)"):
        cameras.rays(index, pixels[:2], AABB)
    with pytest.raises(ValueError, match=r"camera_index must lie in 0\.\.5, the cameras, got -1\.\.6"):
        cameras.rays(torch.tensor([0, -1, 6]), pixels, AABB)
    for camera in (-1, 6):
        with pytest.raises(IndexError, match=rf"camera must be 0 <= camera < 6, got {camera}"):
            cameras.image_rays(camera, AABB)


def on_circle(distance, elevation, count=5, arc=2 * math.pi):
    """Cameras about the z axis that look at the origin, upright."""
    azimuth = 0.3 + torch.arange(count) * (arc / count)
    flat, high = math.cos(elevation), math.sin(elevation)
    back = torch.stack((flat * azimuth.cos(), flat * azimuth.sin(), torch.full((count,), high)), dim=-1)
    c2w = looking_at((0.0, 0.0, 0.0), distance * back)
    return Cameras(c2w, torch.tensor([[60.0, 50.0, 31.0, 25.0]]).repeat(count, 1), 64, 48)


def test_orbit_keeps_distance_elevation_and_intrinsics(device):
    target = torch.tensor([0.5, -1.0, 0.25])
    cameras = on_circle(4.0, 0.6)
    cameras.c2w[:, :3, 3] += target
    path = orbit(cameras.to(device), target.to(device), 8)
    assert len(path) == 8
    assert path.c2w.device.type == device.type
    arm = (path.c2w[:, :3, 3].cpu() - target).double()
    torch.testing.assert_close(arm.norm(dim=-1), torch.full((8,), 4.0).double())
    torch.testing.assert_close(arm[:, 2], torch.full((8,), 4.0 * math.sin(0.6)).double())
    steps = torch.atan2(arm[:, 1], arm[:, 0]).diff().remainder(2 * math.pi)
    torch.testing.assert_close(steps, torch.full((7,), math.pi / 4).double())
    torch.testing.assert_close(path.intrinsics.cpu(), cameras.intrinsics[:1].expand(8, 4))
    assert (path.width, path.height) == (64, 48)


def test_orbit_takes_the_means():
    mixed = Cameras(
        torch.cat([on_circle(2.0, 0.2, 1).c2w, on_circle(4.0, 0.6, 1).c2w]), torch.ones(2, 4), width=8, height=8
    )
    arm = orbit(mixed, torch.zeros(3), 3).c2w[:, :3, 3]
    torch.testing.assert_close(arm.norm(dim=-1), torch.full((3,), 3.0))
    torch.testing.assert_close(arm[:, 2], torch.full((3,), 3.0 * math.sin(0.4)))


@pytest.mark.parametrize("elevation", [0.0, 0.7, -0.5, math.pi / 2])
def test_orbit_looks_at_the_target_upright(elevation):
    target = torch.tensor([0.1, 0.2, 0.3])
    cameras = on_circle(3.0, elevation)
    cameras.c2w[:, :3, 3] += target
    path = orbit(cameras, target, 7)
    rotation = path.c2w[:, :3, :3]
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3).expand(7, 3, 3))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(7))
    pixels, depth = project(path, torch.arange(7), target.expand(7, 3))
    torch.testing.assert_close(pixels, torch.tensor([[31.0, 25.0]]).double().expand(7, 2), rtol=0, atol=1e-4)
    torch.testing.assert_close(depth, torch.full((7,), 3.0).double())
    assert torch.equal(path.c2w[:, 2, 0], torch.zeros(7)), "the horizon is tilted"
    assert (path.c2w[:, 2, 1] > -1e-6).all(), "upside down"


def test_orbit_goes_around_the_direction_that_is_up_in_the_images(device):
    cameras = on_circle(3.0, 0.4)
    (turn,) = random_rotations(1)
    turned = Cameras(cameras.c2w.clone(), cameras.intrinsics, cameras.width, cameras.height)
    turned.c2w[:, :3] = turn @ cameras.c2w[:, :3]
    assert float(turn[2, 2]) < math.cos(math.radians(15)), "the axis must be another one than z"
    path = orbit(turned.to(device), torch.zeros(3, device=device), 16).c2w.cpu()
    arm = path[:, :3, 3] @ turn  # as if the world stood upright
    torch.testing.assert_close(arm.norm(dim=-1), torch.full((16,), 3.0))
    torch.testing.assert_close(arm[:, 2], torch.full((16,), 3.0 * math.sin(0.4)), atol=1e-4, rtol=0)
    right = path[:, :3, 0] @ turn
    assert right[:, 2].abs().max() < 1e-5, "the horizon is tilted"
    torch.testing.assert_close(torch.linalg.det(path[:, :3, :3]), torch.ones(16))


def test_orbit_stays_on_the_side_where_the_cameras_are():
    side = on_circle(3.0, 0.2, 8, arc=1.2)
    side.c2w[:, :3] = torch.tensor([[-1.0, 0, 0], [0, -1, 0], [0, 0, 1]]) @ side.c2w[:, :3]  # across the turn at pi
    middle = torch.atan2(side.c2w[:, 1, 3].mean(), side.c2w[:, 0, 3].mean())
    covered = (torch.atan2(side.c2w[:, 1, 3], side.c2w[:, 0, 3]) - middle).remainder(2 * math.pi)
    reach = torch.minimum(covered, 2 * math.pi - covered).max()
    path = orbit(side, torch.zeros(3), 40).c2w
    swing = (torch.atan2(path[:, 1, 3], path[:, 0, 3]) - middle + math.pi).remainder(2 * math.pi) - math.pi
    assert swing.abs().max() <= reach + 1e-3
    assert swing.max() > 0.9 * reach
    assert swing.min() < -0.9 * reach
    # No station is far from the one before, the first not from the last.
    assert (swing - swing.roll(1)).abs().max() < 0.2


@pytest.mark.parametrize(
    ("count", "target", "frames", "message"),
    [
        (6, torch.zeros(3), 2.5, r"frames must be an int of at least 1, got 2\.5"),
        (0, torch.zeros(3), 4, "cameras must be at least one"),
        (6, torch.zeros(3), 0, "frames must be an int of at least 1, got 0"),
        (6, torch.zeros(1, 3), 4, r"target must have shape .*, got \(1, 3\)"),
    ],
)
def test_orbit_refuses_wrong_arguments(count, target, frames, message):
    with pytest.raises(ValueError, match=message):
        orbit(make_cameras()[:count], target, frames)
