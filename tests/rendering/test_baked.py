"""Fields that are stored at vertices: what is stored, and the images that are drawn from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from baked_fields import BOX, NESTED, SETTINGS, half_empty, look_at, make_field
from image_ops import render_baked_image
from torch.nn.functional import normalize

from voxelfield import FieldRenderer, ops
from voxelfield.fields.decoders import DeferredMLPDecoder, FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import Field, RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.ops._internal.stencil import atlas_coordinates
from voxelfield.rendering.bricks import Bricks, bake, can_bake, stored_bytes
from voxelfield.rendering.occupancy import OccupancyGrid

# The colour network computes in float16 on CUDA.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
warped = pytest.mark.parametrize("warp", [None, NESTED], ids=["one box", "nested boxes"])


class Stored(Field):
    """The general path's view of bricks: a field that reads them with ops that have tests of their own."""

    def __init__(self, field: RadianceField, bricks: Bricks) -> None:
        self.bricks, self.aabb, self.warp, self._shade = bricks, field.aabb, field.warp, field.shade
        low, high = bricks.aabb
        self._low, self._extent = low, high - low

    def _read(self, atlas: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        unit = (positions - self._low) / self._extent
        return ops.sample_trilinear(atlas, atlas_coordinates(unit, self.bricks.blocks, atlas.shape[:3]))

    def density(self, positions: torch.Tensor) -> torch.Tensor:
        # A position without a block reads 0 instead of the logarithm of 0.
        log = self._read(self.bricks.log_density.float()[..., None] + 100, positions)[:, 0] - 100
        return log.exp()

    density_in_warp = density

    def sample(self, samples: ops.PackedSamples, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._read(self.bricks.values.float() / 255, samples.positions)[:, : len(self.bricks.low)]
        return self.density(samples.positions), self.bricks.low + self.bricks.extent * values

    def shade(self, *arguments: torch.Tensor | None) -> torch.Tensor:
        return self._shade(*arguments)


@warped
@pytest.mark.parametrize("geometry", [8, 16])
@pytest.mark.parametrize("supersampling", [1, 2])
def test_images_are_those_of_what_is_stored(device, warp, geometry, supersampling):
    field = make_field(device, warp, geometry)
    occupancy, background = half_empty(field), torch.rand(3).to(device)
    cameras, options = look_at(device), {"supersampling": supersampling}
    baked = FieldRenderer(field, occupancy, SETTINGS, background, **options)
    assert baked.backend == "render_baked_image"
    expected = FieldRenderer(Stored(field, bake(field, occupancy)), occupancy, SETTINGS, background, **options)
    assert expected.backend == "render_view"
    for camera in range(2):
        own, other = baked.view(cameras, camera), expected.view(cameras, camera)
        assert 0.2 < own.opacity.mean() < 0.95, "the test shows nothing"
        for name in ("rgb", "opacity", "depth"):
            torch.testing.assert_close(
                getattr(own, name), getattr(other, name), atol=TOLERANCE[device.type], rtol=TOLERANCE[device.type]
            )


@warped
def test_vertices_store_what_the_field_emits_there(device, warp):
    field = make_field(device, warp)
    occupancy = half_empty(field)
    bricks = bake(field, occupancy)
    low, high = field.grid.aabb
    last = torch.tensor(field.grid.resolution, device=device) - 1
    # Vertices of the finest level in occupied cells.
    vertices = low + (high - low) * (torch.rand(4000, 3, device=device) * (last + 1)).floor() / last
    vertices = vertices[occupancy.contains(vertices)]
    assert len(vertices) > 500
    stored = Stored(field, bricks)
    each = torch.arange(len(vertices) + 1, device=device)
    zeros = torch.zeros_like(vertices[:, 0])
    samples = ops.PackedSamples(vertices, zeros, zeros, each[:-1], each, each[-1:])
    density, values = field.sample(samples, normalize(torch.randn_like(vertices), dim=-1))
    own_density, own_values = stored.sample(samples, torch.zeros_like(vertices))
    # 11 bits of logarithms and half a step of 255, read up to 1/1024 of a voxel beside the faces of blocks.
    torch.testing.assert_close(own_density.log(), density.log(), atol=0.02, rtol=0)
    # Values beyond those of vertices that absorb light are not needed.
    shown = values.clamp(bricks.low, bricks.low + bricks.extent)
    assert (shown == values).float().mean() > 0.95
    assert ((own_values - shown).abs() <= (0.5 / 255 + 3 / 1024) * bricks.extent).all()


def test_blocks_lie_where_sparse_levels_have_theirs(device):
    field = make_field(device, None)
    pyramid = VoxelPyramid((4, 12), 4, BOX, init_range=2.0, sparse_resolutions=[28])
    cells = torch.zeros(4, 4, 4, dtype=torch.bool)
    cells[1, 2, 3] = True
    pyramid.allocate(28, cells, pyramid.aabb)
    pyramid.activate(28)
    wide = DeferredMLPDecoder(12, 32, 8, 1, 2, ExponentialDensity(0.5))
    field = RadianceField(pyramid, wide).to(device)
    occupancy = OccupancyGrid(9, BOX).to(device)
    occupancy.occupied.fill_(True)
    # A block of the sparse level has 7 voxels along each axis, and a stored one half as many.
    stored = (bake(field, occupancy).blocks >= 0).nonzero()
    assert len(stored) == 8
    assert stored.amin(dim=0).tolist() == [2, 4, 6]


@warped
@pytest.mark.parametrize("per_voxel", [1, 2, 3])
def test_the_memory_of_blocks_is_known_before(device, warp, per_voxel):
    field = make_field(device, warp, 12)
    occupancy = half_empty(field)
    bricks = bake(field, occupancy, per_voxel)
    stored = int((bricks.blocks >= 0).sum()) * 512 * (2 + 16)
    assert stored_bytes(field, occupancy, per_voxel) == stored <= bricks.log_density.nbytes + bricks.values.nbytes


def test_only_blocks_with_occupied_cells_are_stored(device):
    field = make_field(device, None)
    occupancy = OccupancyGrid(9, BOX).to(device)
    occupancy.occupied.zero_()
    occupancy.occupied[0, 0, 0] = True
    assert (bake(field, occupancy).blocks >= 0).sum() == 1
    occupancy.occupied.zero_()
    view = FieldRenderer(field, occupancy, SETTINGS, torch.ones(3, device=device)).view(look_at(device), 0)
    assert (view.opacity == 0).all()
    assert (view.rgb == 1).all()


def test_fields_that_cannot_be_stored_are_rendered_in_general(device):
    field = make_field(device, None)
    assert can_bake(field)
    per_sample = RadianceField(field.grid, FusedMLPDecoder(8, 32, 16, 1, 2, ExponentialDensity(2.0)))
    wide = RadianceField(field.grid, DeferredMLPDecoder(8, 32, 18, 1, 2, ExponentialDensity(2.0)))
    assert not can_bake(per_sample)
    assert not can_bake(wide)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": lambda v: v[..., :4].contiguous()}, "values must be 8 or 16 for each vertex, got 4"),
        ({"log_density": lambda d: d.float()}, "log_density must be"),
        ({"clip": lambda _: None}, "clip must be given if and only if there are no boxes"),
    ],
)
def test_bricks_of_another_form_are_refused(device, change, message):
    field, cameras = make_field(device, None), look_at(device)
    occupancy = half_empty(field)
    bricks = bake(field, occupancy)
    tensors = {
        "log_density": bricks.log_density,
        "values": bricks.values,
        "blocks": bricks.blocks,
        "aabb": bricks.aabb,
        "clip": field.grid.aabb,
    }
    tensors |= {name: make(tensors[name]) for name, make in change.items()}
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        render_baked_image(
            *(cameras.c2w[0], cameras.intrinsics[0], 33, 21, occupancy.bits, occupancy.aabb), step=0.1, **tensors
        )


def test_images_may_have_more_rows_than_a_launch_has_blocks_along_y(device):
    field = make_field(device, None)
    occupancy = half_empty(field)
    bricks = bake(field, occupancy)
    c2w = look_at(device).c2w[0]
    stored = {"log_density": bricks.log_density, "values": bricks.values, "blocks": bricks.blocks}
    stored |= {"aabb": bricks.aabb, "clip": field.grid.aabb}

    def render(height):
        intrinsics = torch.tensor([30.0, 30.0, 1.0, height - 8.0], device=device)
        return render_baked_image(c2w, intrinsics, 2, height, occupancy.bits, occupancy.aabb, step=0.1, **stored)

    expected = render(16)
    assert expected[1].any()
    for tall, low in zip(render(16 * 65_535 + 32), expected, strict=True):
        assert torch.equal(tall[-16:], low)


def test_the_walk_stops_where_no_light_is_left(device):
    field = make_field(device, None)
    occupancy, black = half_empty(field), torch.zeros(3, device=device)
    whole, early = (
        FieldRenderer(field, occupancy, replace(SETTINGS, min_transmittance=limit), black).view(look_at(device), 0)
        for limit in (0.0, 0.3)
    )
    assert (early.opacity <= whole.opacity + 1e-6).all()
    assert (early.opacity < whole.opacity - 1e-3).any()
    assert (1 - early.opacity <= 0.3 + 1e-6).sum() == (1 - whole.opacity <= 0.3 + 1e-6).sum()
