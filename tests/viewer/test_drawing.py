"""Pictures of every mode against what they stand for."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from viewer_scene import SIZE, bricks, trained_run

from voxelfield.captures.capture import thumbnail
from voxelfield.models.model import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.view_pictures import PICTURES, depth_colors
from voxelfield.rendering.viewpoints import Viewpoint, viewpoint_of
from voxelfield.viewer.pictures import Painter, PictureRequest
from voxelfield.warps.nested_boxes import NestedBoxes


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter(trained_run())


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
    picture = painter.picture(PictureRequest(viewpoint, "rgb", SIZE, SIZE), sharp=True)
    assert (picture.int() - to_uint8(direct).int()).abs().max() <= 1
    assert picture.float().std() > 20, "the field shows nothing"


def test_supersampling_is_for_sharp_pictures_alone(viewpoint):
    run = trained_run()
    trainer = replace(run.trainer, evaluation=replace(run.trainer.evaluation, supersampling=2))
    model = copy.copy(run.model)
    model.sampling = trainer.sampling
    run = replace(run, config=replace(run.config, trainer=trainer), model=model)
    painter = Painter(run)
    sharp = painter.picture(PictureRequest(viewpoint, "rgb", 20, 20), sharp=True)
    cameras = viewpoint.cameras(20, 20)
    assert (sharp.int() - to_uint8(run.render(cameras).rgb).int()).abs().max() <= 1
    plain = painter.picture(PictureRequest(viewpoint, "rgb", 20, 20))
    assert (plain.int() - to_uint8(trained_run().render(cameras).rgb).int()).abs().max() <= 1
    assert not torch.equal(plain, sharp)


def test_thumbnails_keep_the_aspect():
    tall = Image.fromarray(bricks().train.images[0, :, :20].numpy())
    assert thumbnail(tall, 10, (255, 0, 0)).size == (5, 10)


@pytest.mark.parametrize("mode", PICTURES)
def test_bands_make_up_the_whole_picture(painter, viewpoint, mode):
    request = PictureRequest(viewpoint, mode, 30, 24)
    whole = painter.picture(request)
    bands = [painter.picture(request, rows) for rows in ((0, 11), (11, 12), (12, 30))]
    together = torch.cat(bands)
    assert together.shape == whole.shape
    assert (together.int() - whole.int()).abs().max() <= 1


def test_the_colours_of_depths_span_the_picture(painter, viewpoint):
    view = trained_run().render(viewpoint.cameras(SIZE, SIZE))
    picture = painter.picture(PictureRequest(viewpoint, "depth", SIZE, SIZE))
    own = to_uint8(depth_colors(view.depth, view.opacity))
    assert (picture.int() - own.int()).abs().float().mean() < 4
    solid = view.opacity > 0.5
    assert len(picture[solid].unique(dim=0)) > 20
    assert (picture[~solid] == 255).all()


def test_a_narrow_image_shows_the_square_in_the_middle(viewpoint):
    assert viewpoint.fitted(1.8) == viewpoint
    narrow = viewpoint.fitted(0.5).cameras(2 * SIZE, SIZE)
    torch.testing.assert_close(narrow.intrinsics[0, :2], viewpoint.cameras(SIZE, SIZE).intrinsics[0, :2])


def test_the_content_is_the_smallest_nested_box_or_the_occupied_cells():
    boxed = SimpleNamespace(warp=NestedBoxes(((-1.0,) * 3, (1.0,) * 3), 3))
    assert Model.content_box.fget(boxed).tolist() == [[-1.0] * 3, [1.0] * 3]
    torch.testing.assert_close(trained_run().model.content_box, trained_run().occupancy.bounds())
