"""Pictures of every mode against what they stand for."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from viewer_scene import SIZE, bricks, nested_run, trained_run

from voxelfield.datasets.scene import Split
from voxelfield.grids.boxes import parse_box
from voxelfield.rendering.images import composite_background, turbo
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import render
from voxelfield.viewer.drawing.density_plane import draw_density
from voxelfield.viewer.drawing.look import MODES, Look, Slice
from voxelfield.viewer.drawing.maps import MANY_SAMPLES, brightened, depth_map, normal_map
from voxelfield.viewer.drawing.occupied_cells import cell_map
from voxelfield.viewer.drawing.painter import Painter, content_boxes, reference_of
from voxelfield.viewer.drawing.photographs import Photographs
from voxelfield.viewer.drawing.viewpoint import Viewpoint, viewpoint_of
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


def test_a_sharp_picture_is_that_of_the_runs_own_renderer(painter, viewpoint):
    direct = trained_run().render(bricks().train.cameras, 3).rgb
    picture = painter.picture(viewpoint, Look(), SIZE, SIZE, sharp=True)
    assert (picture.int() - to_uint8(direct).int()).abs().max() <= 1
    assert picture.float().std() > 20, "the field shows nothing"


def test_supersampling_is_for_sharp_pictures_alone(viewpoint):
    run = trained_run()
    trainer = replace(run.trainer, evaluation=replace(run.trainer.evaluation, supersampling=2))
    model = replace(run.model, sampling=trainer.sampling)
    run = replace(run, config=replace(run.config, trainer=trainer), model=model)
    painter = Painter(run)
    sharp = painter.picture(viewpoint, Look(), 20, 20, sharp=True)
    cameras = viewpoint.cameras(20, 20)
    assert (sharp.int() - to_uint8(run.render(cameras).rgb).int()).abs().max() <= 1
    plain = painter.picture(viewpoint, Look(), 20, 20)
    assert (plain.int() - to_uint8(trained_run().render(cameras).rgb).int()).abs().max() <= 1
    assert not torch.equal(plain, sharp)


@pytest.mark.parametrize("mode", MODES)
def test_bands_make_up_the_whole_picture(painter, viewpoint, mode):
    look = Look(mode, cut=Slice(2, 0.1) if mode == "rgb" else None, photo_share=0.4)
    whole = painter.picture(viewpoint, look, 30, 24, photo=3)
    bands = [painter.picture(viewpoint, look, 30, 24, rows=rows, photo=3) for rows in ((0, 11), (11, 12), (12, 30))]
    together = torch.cat(bands)
    assert together.shape == whole.shape
    # At the first and the last row of the image, differences of neighbours are one-sided.
    inner = slice(1, -1) if mode == "normal" else slice(None)
    assert (together[inner].int() - whole[inner].int()).abs().max() <= 1


def test_modes_differ_from_one_another(painter, viewpoint):
    pictures = [painter.picture(viewpoint, Look(mode), 24, 24).float() for mode in MODES]
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
    picture = painter.picture(viewpoint, Look("samples per ray"), 12, 12)
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
    assert reference_of(None) is None
    assert torch.equal(reference_of(warp).c2w[0], torch.eye(4))


def test_nothing_is_drawn_outside_of_the_crop_box(painter, viewpoint):
    low, high = content_boxes(trained_run())[0].tolist()
    cut = (low[0] + high[0]) / 2
    half = painter.picture(viewpoint, Look("opacity", crop=((*low,), (cut, *high[1:]))), SIZE, SIZE)
    whole = painter.picture(viewpoint, Look("opacity"), SIZE, SIZE)
    cell = float((trained_run().occupancy.aabb[1] - trained_run().occupancy.aabb[0])[0]) / 16
    box = torch.tensor([[cut + cell, low[1], low[2]], high])
    kept = torch.tensor([low, [cut + cell, *high[1:]]])
    cameras = viewpoint.cameras(SIZE, SIZE)
    gone = (cameras.image_rays(0, box).far > 0) & (cameras.image_rays(0, kept).far == 0)
    gone = gone.view(SIZE, SIZE)
    assert whole[gone].max() > 100, "nothing to leave out"
    assert half[gone].max() == 0
    assert half.max() > 100
    assert torch.equal(painter.picture(viewpoint, Look("opacity"), SIZE, SIZE), whole)


def test_a_slice_shows_the_density_on_its_plane():
    down = torch.eye(4)
    down[2, 3] = 2.0
    cameras = Viewpoint.of(down, 1.5).cameras(31, 31)
    box = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 0.5, 1.0]])
    rays = cameras.image_rays(0, box)
    points = rays.origins + rays.directions * (1.5 / -rays.directions[:, 2:])
    before = torch.zeros(31, 31, 3)
    picture = draw_density(
        before,
        cameras.c2w[0, :3, 3],
        rays.directions.view(31, 31, 3),
        box,
        2,
        0.5,
        lambda places: torch.where(places.norm(dim=-1) < 0.8, 10.0, 0.0),
    ).view(-1, 3)
    inside = ((points >= box[0]) & (points <= box[1]))[:, :2].all(dim=-1)
    solid = inside & (points.norm(dim=-1) < 0.8)
    assert solid.any()
    assert (inside & ~solid).any()
    red, _, blue = picture.unbind(-1)
    assert (red[solid] > 2 * blue[solid]).all()
    assert (blue[inside & ~solid] > red[inside & ~solid]).all()
    torch.testing.assert_close(picture[~inside], torch.full((int((~inside).sum()), 3), 0.7))


def test_a_slice_behind_the_camera_is_not_drawn(painter, viewpoint):
    height = float(viewpoint.matrix[2, 3]) + 1.0
    plain = painter.picture(viewpoint, Look(), 16, 16).int()
    picture = painter.picture(viewpoint, Look(cut=Slice(2, height)), 16, 16).int()
    # Only paler: no colour is added.
    assert (picture - (0.3 * plain + 0.7 * 255)).abs().max() <= 1


def turned_away(viewpoint: Viewpoint) -> Viewpoint:
    return Viewpoint.of(viewpoint.matrix @ torch.diag(torch.tensor([-1.0, 1.0, -1.0, 1.0])), viewpoint.fov)


def test_a_picture_that_shows_nothing_has_its_reason_named(painter, viewpoint):
    assert painter.absence(viewpoint, Look()) == ""
    assert painter.absence(turned_away(viewpoint), Look()) == "no part of the field is visible from here"
    elsewhere = ((5.0, 5.0, 5.0), (6.0, 6.0, 6.0))
    assert painter.absence(viewpoint, Look(crop=elsewhere)) == "no part of the field lies within the crop box"
    assert painter.absence(viewpoint, Look()) == ""


@pytest.mark.parametrize("emptied", ["occupancy", "density"])
def test_an_empty_field_is_named(viewpoint, emptied):
    run = copy.deepcopy(trained_run())
    if emptied == "occupancy":
        run.occupancy.occupied.fill_(False)
    else:
        run.field.density = lambda points: torch.full_like(points[:, 0], 1e-4)  # per unit
    away = turned_away(viewpoint)
    assert Painter(run).absence(away, Look()).startswith("the field is empty")
    # A field that has diverged is not empty.
    run.field.density = lambda points: torch.full_like(points[:, 0], torch.nan)
    run.occupancy.occupied.fill_(True)
    assert Painter(run).absence(away, Look()) == "no part of the field is visible from here"


def test_a_slice_goes_as_far_as_it_is_told_to(viewpoint):
    boxes, painter = content_boxes(nested_run()), Painter(nested_run())
    torch.testing.assert_close([box[1] - box[0] for box in boxes[1:]], [2 * (box[1] - box[0]) for box in boxes[:-1]])
    middle = float(boxes[0][:, 2].mean())
    small, large = (
        painter.picture(viewpoint, Look(cut=Slice(2, middle, within)), 32, 32) for within in (None, parse_box(boxes[1]))
    )
    rays = viewpoint.cameras(32, 32).image_rays(0, boxes[1])
    reached = rays.origins + rays.directions * ((middle - rays.origins[:, 2]) / rays.directions[:, 2])[:, None]
    within = [((reached >= box[0]) & (reached <= box[1]))[:, :2].all(dim=-1).view(32, 32) for box in boxes[:2]]
    assert torch.equal((small != large).any(dim=-1), within[1] & ~within[0])


def test_a_step_of_a_slice_is_as_long_as_the_boxes_are_large():
    run, painter = nested_run(), Painter(nested_run())
    smallest = torch.tensor(run.field.warp.world_box(1))
    half = smallest.diff(dim=0) / 2
    points = smallest.mean(dim=0) + torch.tensor([[0.5], [1.5]]) * half
    step = run.model.settings.step * run.field.warp.unit
    expected = run.density(points) * step * torch.tensor([1.0, 2.0])
    assert (expected > 0).all()
    torch.testing.assert_close(painter._optical_depth(points), expected)


def test_a_stop_doubles_the_light():
    torch.testing.assert_close(brightened(torch.tensor([0.5, 1.0]), 0.0), torch.tensor([0.5, 1.0]))
    light = ((0.5 + 0.055) / 1.055) ** 2.4
    expected = 1.055 * (2 * light) ** (1 / 2.4) - 0.055
    torch.testing.assert_close(brightened(torch.tensor([0.5, 0.9]), 1.0), torch.tensor([expected, 1.0]))


@pytest.mark.parametrize("lens", [None, Lens("perspective", torch.tensor([[0.8, 0, 0, 0, 0, 0]]))])
def test_the_photograph_covers_the_share_of_the_picture(lens):
    train = bricks().train
    cameras = replace(train.cameras[[3]], lens=lens)
    photographs = Photographs({"train": Split(train.images[3:4], cameras, train.names[3:4])})
    painter = Painter(trained_run(), photographs)
    viewpoint = viewpoint_of(cameras, 0)
    picture = painter.picture(viewpoint, Look(photo_share=0.5), SIZE, SIZE, photo=0)
    plain = painter.picture(viewpoint, Look(), SIZE, SIZE)
    photo = to_uint8(composite_background(train.images[3], torch.ones(3)))
    line = SIZE // 2
    assert torch.equal(picture[:, line + 1 :], plain[:, line + 1 :])
    same = (picture[:, :line] == photo[:, :line]).all(dim=-1).float().mean()
    assert same == 1 if lens is None else 0.3 < same < 1
    assert photographs.seen_from(0, viewpoint.matrix, 1.0)
    moved = viewpoint.matrix.clone()
    moved[0, 3] += 0.05
    assert not photographs.seen_from(0, moved, 1.0)


def test_cameras_are_as_far_apart_as_the_nearest_other_one():
    places = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
    c2w = torch.eye(4).repeat(4, 1, 1)
    c2w[:, :3, 3] = places
    nearby = c2w[3:].clone()
    nearby[0, 1, 3] += 0.5
    train = bricks().train
    splits = {
        "train": Split(train.images[:4], replace(train.cameras[:4], c2w=c2w), train.names[:4]),
        "test": Split(train.images[:1], replace(train.cameras[[0]], c2w=nearby), train.names[:1]),
    }
    assert Photographs({"test": splits["test"]}).spacing() == math.inf
    assert Photographs({"train": splits["train"]}).spacing() == pytest.approx(1.0)
    # Distances to the nearest are 1, 1, 3 and 0.5 now: torch's median is the lower one of the middle two.
    assert Photographs(splits).spacing() == pytest.approx(0.5)


def test_thumbnails_keep_the_aspect():
    train = bricks().train
    tall = Split(train.images[:1, :, :20], replace(train.cameras[[0]], width=20), train.names[:1])
    assert Photographs({"train": tall}).thumbnail(0, 10, torch.ones(3)).shape == (10, 5, 3)
