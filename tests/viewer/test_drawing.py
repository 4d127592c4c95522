"""Pictures of every mode against what they stand for."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from viewer_scene import SIZE, bricks, trained_run

from voxelfield.datasets.scene import Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.images import composite_background, turbo
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import render
from voxelfield.viewer.display import MODES, Display, Viewpoint, viewpoint_of
from voxelfield.viewer.maps import MANY_SAMPLES, cell_map, depth_map, normal_map
from voxelfield.viewer.painter import Painter, content_box, crop_limits
from voxelfield.viewer.photographs import Photographs
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import NestedBoxes


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter(trained_run(), Photographs.of(bricks(), ("train", "val"), None))


@pytest.fixture(scope="module")
def viewpoint() -> Viewpoint:
    return viewpoint_of(bricks().train.cameras, 3)


def test_a_photographs_viewpoint_sees_what_its_camera_sees(viewpoint):
    given, own = bricks().train.cameras[[3]], viewpoint.cameras(SIZE, SIZE)
    torch.testing.assert_close(own.c2w, given.c2w)
    torch.testing.assert_close(own.intrinsics, given.intrinsics)
    wide = viewpoint_of(given, 0, aspect=0.5).cameras(2 * SIZE, SIZE)
    torch.testing.assert_close(wide.intrinsics[0, :2], given.intrinsics[0, :2])


def test_the_viewpoint_of_a_panorama_shows_a_right_angle():
    given = bricks().train.cameras[:1]
    sphere = Cameras(
        given.c2w, torch.tensor([[32.0, 32.0, 7.0, 50.0]]), 200, 100, Lens("equirectangular", torch.zeros(1, 0))
    )
    assert viewpoint_of(sphere, 0).fov == pytest.approx(math.pi / 2)


def test_a_sharp_picture_is_that_of_the_runs_own_renderer(painter, viewpoint):
    direct = trained_run().render(bricks().train.cameras, 3).rgb
    picture = painter.picture(viewpoint, Display(), SIZE, SIZE, sharp=True)
    assert (picture.int() - to_uint8(direct).int()).abs().max() <= 1
    assert picture.float().std() > 20, "the field shows nothing"


def test_supersampling_is_for_sharp_pictures_alone(viewpoint):
    run = trained_run()
    trainer = replace(run.trainer, evaluation=replace(run.trainer.evaluation, supersampling=2))
    model = run.model.around()
    model.sampling = trainer.sampling
    run = replace(run, config=replace(run.config, trainer=trainer), model=model)
    painter = Painter(run)
    sharp = painter.picture(viewpoint, Display(), 20, 20, sharp=True)
    cameras = viewpoint.cameras(20, 20)
    assert (sharp.int() - to_uint8(run.render(cameras).rgb).int()).abs().max() <= 1
    plain = painter.picture(viewpoint, Display(), 20, 20)
    assert (plain.int() - to_uint8(trained_run().render(cameras).rgb).int()).abs().max() <= 1
    assert not torch.equal(plain, sharp)


@pytest.mark.parametrize("mode", MODES)
def test_bands_make_up_the_whole_picture(painter, viewpoint, mode):
    look = Display(mode, photo_fraction=0.4)
    whole = painter.picture(viewpoint, look, 30, 24, photo=3)
    bands = [painter.picture(viewpoint, look, 30, 24, rows=rows, photo=3) for rows in ((0, 11), (11, 12), (12, 30))]
    together = torch.cat(bands)
    assert together.shape == whole.shape
    # At the first and the last row of the image, differences of neighbours are one-sided.
    inner = slice(1, -1) if mode == "normal" else slice(None)
    assert (together[inner].int() - whole[inner].int()).abs().max() <= 1


def test_modes_differ_from_one_another(painter, viewpoint):
    pictures = [painter.picture(viewpoint, Display(mode), 24, 24).float() for mode in MODES]
    for index, picture in enumerate(pictures):
        for other in pictures[:index]:
            assert (picture - other).abs().mean() > 5


def test_depth_is_coloured_from_near_to_far():
    depth = torch.tensor([[2.0, 4.0, 3.0]])
    colors = depth_map(depth, torch.tensor([[1.0, 1.0, 0.1]]), 2.0, 4.0)
    torch.testing.assert_close(colors[0, :2], turbo(torch.tensor([0.0, 1.0])))
    assert torch.equal(colors[0, 2], torch.ones(3))
    endless = depth_map(torch.tensor([[2.0, 1e9]]), torch.ones(1, 2), 2.0, math.inf)
    torch.testing.assert_close(endless[0], turbo(torch.tensor([0.0, 1.0])))


def test_normals_of_a_plane_point_at_the_camera():
    viewpoint = Viewpoint.of(torch.eye(4), 0.8)
    directions = viewpoint.cameras(9, 9).image_rays(0, torch.tensor([[-9.0] * 3, [9.0] * 3])).directions.view(9, 9, 3)
    normal = torch.nn.functional.normalize(torch.tensor([0.3, -0.2, 1.0]), dim=0)
    depth = -5.0 / (directions @ normal)
    colors = normal_map(depth, torch.ones(9, 9), torch.zeros(3), directions)
    torch.testing.assert_close(colors, (0.5 + 0.5 * normal).expand(9, 9, 3), atol=1e-4, rtol=0)


def test_sample_counts_are_those_of_rendering(painter, viewpoint):
    run, cameras = trained_run(), viewpoint.cameras(12, 12)
    rays = cameras.image_rays(0, run.field.aabb)
    counts = render(run.field, rays, run.occupancy, run.model.settings).samples.ray_offsets.diff()
    expected = torch.where((counts > 0)[:, None], turbo(counts / MANY_SAMPLES), torch.ones(144, 3))
    picture = painter.picture(viewpoint, Display("samples per ray"), 12, 12)
    assert counts.max() > 3
    assert torch.equal(picture, to_uint8(expected).view(12, 12, 3))


@pytest.mark.parametrize("boxes", [None, NestedBoxes(((-1.0,) * 3, (1.0,) * 3), 3)])
def test_cells_are_drawn_where_rays_meet_them_first(boxes):
    aabb = torch.tensor([[-1.0] * 3, [1.0] * 3]) if boxes is None else torch.tensor(boxes.warped_aabb)
    grid = OccupancyGrid(8 if boxes is None else (24, 8, 8), aabb)
    grid.occupied.fill_(False)
    middle = torch.tensor([[0.3, -0.4, 0.1]])
    low, high = grid.aabb
    size = torch.tensor(grid.occupied.shape)
    x, y, z = (((middle - low) / (high - low)) * size).long()[0].tolist()
    grid.occupied[x, y, z] = True
    corner = low + torch.tensor([x, y, z]) / size * (high - low)
    origins = torch.tensor([[0.3, -0.4, 3.0], [0.3, 3.0, 0.1], [0.9, 0.9, 3.0]])
    directions = torch.tensor([[0.0, 0.0, -1.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]])
    assert ((middle - corner) > 0).all()
    box = torch.tensor([[-1.0] * 3, [1.0] * 3])
    rays = Rays(origins, directions, *intersect_aabb(origins, directions, box))
    colors = cell_map(rays, grid, 0.05, boxes)
    assert torch.equal(colors[2], torch.ones(3))
    # One cell, so one hue; from above it is brighter than from the side.
    torch.testing.assert_close(colors[0] / colors[0].norm(), colors[1] / colors[1].norm())
    assert colors[1].norm() < 0.8 * colors[0].norm()


def test_a_face_of_a_cell_is_shaded_by_its_direction_in_normalised_device_coordinates():
    """Rays of a camera beside the reference camera meet the front of a wall across the optical axis."""
    rows = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
    warp = NdcBox(((-1.0, -1.0, -9.0), (1.0, 1.0, -2.0)), rows, 1.0, ((-1.0, -1.0), (1.0, 1.0)), 1.0)
    grid = OccupancyGrid(8, torch.tensor(warp.warped_aabb))
    grid.occupied.fill_(False)
    grid.occupied[:, :, 4] = True
    origin = torch.tensor([0.8, 0.0, 0.0])
    ends = torch.tensor([[-0.31, 0.12, -9.0], [-2.2, 0.3, -9.0], [1.3, -1.2, -9.0]])
    directions = torch.nn.functional.normalize(ends - origin, dim=-1)
    rays = Rays(origin.expand(3, 3).contiguous(), directions, torch.zeros(3), torch.full((3,), 50.0))
    colors = cell_map(rays, grid, 0.005, warp)
    # The front faces across z are the brightest of all.
    assert (colors.amax(dim=-1) > 0.9 * turbo(torch.tensor([0.1 + 0.8 * 4.5 / 8])).amax()).all()


def test_nothing_is_drawn_outside_of_the_crop_box(painter, viewpoint):
    low, high = content_box(trained_run())
    cut = (low[0] + high[0]) / 2
    half = painter.picture(viewpoint, Display("opacity", crop=((*low,), (cut, *high[1:]))), SIZE, SIZE)
    whole = painter.picture(viewpoint, Display("opacity"), SIZE, SIZE)
    cell = float((trained_run().occupancy.aabb[1] - trained_run().occupancy.aabb[0])[0]) / 16
    box = torch.tensor([[cut + cell, low[1], low[2]], high])
    kept = torch.tensor([low, [cut + cell, *high[1:]]])
    cameras = viewpoint.cameras(SIZE, SIZE)
    gone = (cameras.image_rays(0, box).far > 0) & (cameras.image_rays(0, kept).far == 0)
    gone = gone.view(SIZE, SIZE)
    assert whole[gone].max() > 100, "nothing to leave out"
    assert half[gone].max() == 0
    assert half.max() > 100
    assert torch.equal(painter.picture(viewpoint, Display("opacity"), SIZE, SIZE), whole)


def test_the_crop_box_reaches_twice_as_far_as_the_smallest_nested_box():
    run = SimpleNamespace(model=SimpleNamespace(warp=NestedBoxes(((-1.0,) * 3, (1.0,) * 3), 3)), parts=(None,))
    assert content_box(run) == ((-1.0,) * 3, (1.0,) * 3)
    assert crop_limits(run) == ((-2.0,) * 3, (2.0,) * 3)
    assert crop_limits(trained_run()) == content_box(trained_run())


@pytest.mark.parametrize("lens", [None, Lens("perspective", torch.tensor([[0.8, 0, 0, 0, 0, 0]]))])
def test_the_photograph_covers_a_fraction_of_the_picture(lens):
    train = bricks().train
    cameras = replace(train.cameras[[3]], lens=lens)
    photographs = Photographs({"train": Split(train.images[3:4], cameras, train.names[3:4])})
    painter = Painter(trained_run(), photographs)
    viewpoint = viewpoint_of(cameras, 0)
    picture = painter.picture(viewpoint, Display(photo_fraction=0.5), SIZE, SIZE, photo=0)
    plain = painter.picture(viewpoint, Display(), SIZE, SIZE)
    photo = to_uint8(composite_background(train.images[3], torch.ones(3)))
    line = SIZE // 2
    assert torch.equal(picture[:, line + 1 :], plain[:, line + 1 :])
    same = (picture[:, :line] == photo[:, :line]).all(dim=-1).float().mean()
    assert same == 1 if lens is None else 0.3 < same < 1
    assert photographs.is_taken_from(0, viewpoint.matrix, 1.0)
    moved = viewpoint.matrix.clone()
    moved[0, 3] += 0.05
    assert not photographs.is_taken_from(0, moved, 1.0)


def test_thumbnails_keep_the_aspect():
    train = bricks().train
    tall = Split(train.images[:1, :, :20], replace(train.cameras[[0]], width=20), train.names[:1])
    assert Photographs({"train": tall}).thumbnail(0, 10, torch.ones(3)).shape == (10, 5, 3)
