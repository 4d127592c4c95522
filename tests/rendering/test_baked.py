"""Fields that are stored at vertices: what is stored, and the images that are drawn from it."""

from __future__ import annotations

import itertools
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
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.ops._internal.stencil import atlas_coordinates
from voxelfield.rendering import bricks as storing
from voxelfield.rendering.bricks import Bricks, bake, can_bake, stored_bytes
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.warps.nested_boxes import NestedBoxes
from voxelfield.warps.warp import nested_box_args

# The colour network computes in float16 on CUDA.
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
warped = pytest.mark.parametrize("warp", [None, NESTED], ids=["one box", "nested boxes"])


class Stored(Field):
    """The general path's view of bricks: a field that reads them with ops that have tests of their own."""

    def __init__(self, field: RadianceField, bricks: Bricks) -> None:
        self.bricks, self.aabb, self.warp, self._shade = bricks, field.aabb, field.warp, field.shade
        low, high = bricks.aabb
        self._low, self._extent, self._count = low, high - low, field.decoder.emitted

    def _placed(self, positions: torch.Tensor) -> torch.Tensor:
        unit = (positions - self._low) / self._extent
        return atlas_coordinates(unit, self.bricks.blocks, self.bricks.density.shape)

    def density(self, positions: torch.Tensor) -> torch.Tensor:
        # A position without a block reads 0 instead of the logarithm of 0.
        log = self.bricks.log_low + self.bricks.log_step * self.bricks.density + 100
        return (ops.sample_trilinear(log[..., None], self._placed(positions))[:, 0] - 100).exp()

    def _values(self, positions: torch.Tensor) -> torch.Tensor:
        bricks, placed = self.bricks, self._placed(positions)
        shape = placed.new_tensor(bricks.density.shape)
        vertex = placed.nan_to_num() * (shape - 1)
        block = (vertex / 8).long()
        _, y, z = (size // 8 for size in bricks.density.shape)
        number = (block[:, 0] * y + block[:, 1]) * z + block[:, 2]
        side = bricks.side[number].long()
        at = (vertex - 8 * block) * (side[:, None] - 1) / 7
        lower = torch.minimum(at.long(), side[:, None] - 2)
        codes = 0
        for corner in itertools.product((0, 1), repeat=3):
            i, j, k = (lower + lower.new_tensor(corner)).unbind(1)
            pairs = bricks.values[bricks.first[number] + (i * side + j) * side + k]
            weight = torch.where(lower.new_tensor(corner) == 1, at - lower, 1 - (at - lower)).prod(dim=1)
            codes = codes + weight[:, None] * torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        least, greatest = bricks.ranges[number].float().unbind(1)
        values = bricks.low + bricks.extent * (least + (greatest - least) * codes / 15) / 255
        return values.masked_fill(placed.isnan()[:, :1], 0)[:, : self._count]

    density_in_warp = density

    def sample(self, samples: ops.PackedSamples, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.density(samples.positions), self._values(samples.positions)

    def shade(self, *arguments: torch.Tensor | None) -> torch.Tensor:
        return self._shade(*arguments)


def stored_tensors(field: RadianceField, bricks: Bricks) -> dict[str, object]:
    """The arguments of the op that describe a field in one box."""
    return vars(bricks) | {
        "clip": field.grid.aabb,
        "background": torch.ones(3, device=field.aabb.device),
        "degree": field.decoder.view_degree,
    }


@warped
@pytest.mark.parametrize("geometry", [8, 16])
@pytest.mark.parametrize(("supersampling", "error", "sides"), [(1, 3e3, {3, 4, 5}), (1, 1e4, {2, 3, 4}), (2, 1e2, {8})])
def test_images_are_those_of_what_is_stored(device, monkeypatch, warp, geometry, supersampling, error, sides):
    monkeypatch.setattr(storing, "_ERROR", error)
    field = make_field(device, warp, geometry)
    occupancy, background = half_empty(field), torch.rand(3).to(device)
    cameras, options = look_at(device), {"supersampling": supersampling}
    baked = FieldRenderer(field, occupancy, SETTINGS, background, **options)
    assert baked.backend == "render_baked_image"
    bricks = bake(field, occupancy)
    drawn = set(bricks.side[: int((bricks.blocks >= 0).sum())].tolist())
    assert len(sides & drawn) >= min(2, len(sides)), "the test has too few numbers of vertices"
    expected = FieldRenderer(Stored(field, bricks), occupancy, SETTINGS, background, **options)
    assert expected.backend == "render_view"
    for camera in range(2):
        own, other = baked.view(cameras, camera), expected.view(cameras, camera)
        assert 0.2 < own.opacity.mean() < 0.95, "the test shows nothing"
        for name in ("rgb", "opacity", "depth"):
            torch.testing.assert_close(
                getattr(own, name), getattr(other, name), atol=TOLERANCE[device.type], rtol=TOLERANCE[device.type]
            )


@pytest.mark.slow
@pytest.mark.cuda
def test_kernels_agree_on_as_many_blocks_as_a_place_has():
    # A capture of a place has over a million blocks. Offsets that overflow or leave a tensor show in no smaller one.
    warp, device = NestedBoxes(BOX, 8, near=0.1), torch.device("cuda")
    lattice = SparseGrid([7 * count for count in (1000, 138, 138)], 1, warp.warped_aabb, device=device)
    lattice.allocate(torch.rand(lattice.exists.shape, device=device) < 0.08, lattice.aabb)
    assert lattice.count > 1_500_000
    atlas = lattice.features.shape[:3]
    side = torch.randint(2, 6, (atlas.numel() // 512,), dtype=torch.uint8, device=device)
    rows = side.long() ** 3
    scene = {
        "density": torch.randint(0, 160, atlas, dtype=torch.uint8, device=device),
        "values": torch.randint(0, 256, (int(rows.sum()) + storing._MARGIN, 8), dtype=torch.uint8, device=device),
        "first": (rows.cumsum(0) - rows).to(torch.int32),
        "side": side,
        "ranges": torch.randint(0, 256, (len(side), 2, 16), dtype=torch.uint8, device=device),
        "low": torch.zeros(16, device=device),
        "extent": torch.ones(16, device=device),
        "blocks": lattice.blocks,
        "aabb": lattice.aabb,
        "background": torch.ones(3, device=device),
        "aabb_occupancy": lattice.aabb,
        "occupied": torch.ones(64, 16, 16, dtype=torch.bool, device=device),
    }
    assert scene["values"].nbytes + scene["density"].nbytes > 2**30
    camera = {"c2w": look_at(device).c2w[1], "intrinsics": torch.tensor([600.0, 600, 400, 266], device=device)}
    rest = {"width": 800, "height": 533, "degree": 2, "step": 0.01, "log_low": -8.0, "log_step": 0.08}
    rest["boxes"] = nested_box_args(warp)
    drawn = render_baked_image(**camera, **scene, **rest)
    expected = render_baked_image(**{name: x.cpu() for name, x in (camera | scene).items()}, **rest)
    assert 0.2 < expected[1].mean() < 0.99, "the test shows nothing"
    for own, other in zip(drawn[:3], expected[:3], strict=True):
        # Rounding moves a sample into another block now and then, whose values have nothing to do with its own.
        assert ((own.cpu() - other).abs() > 0.01).float().mean() < 0.02


@warped
def test_vertices_store_what_the_field_emits_there(device, warp, monkeypatch):
    monkeypatch.setattr(storing, "_CORRECTION", 0.0)
    monkeypatch.setattr(storing, "_ERROR", 0.0)
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
    # Half a step of 254 of logarithms, read up to 1/1024 of a voxel beside the faces of blocks.
    torch.testing.assert_close(own_density.log(), density.log(), atol=0.06, rtol=0)
    # Values beyond those of vertices that absorb light are not needed.
    low, extent = (x[: values.shape[1]] for x in (bricks.low, bricks.extent))
    shown = values.clamp(low, low + extent)
    assert (shown == values).float().mean() > 0.95
    assert ((own_values - shown).abs() <= (0.5 / 15 + 2 / 255 + 3 / 1024) * extent).all()


def test_blocks_have_as_many_vertices_as_their_values_need(device):
    place = torch.cartesian_prod(*[torch.arange(8.0, device=device)] * 3)
    straight = (place @ torch.rand(3, 16, device=device) * 4 + 20).expand(1, -1, -1)
    rough = torch.randint(0, 256, (1, 512, 16), device=device).float()
    bent = (place[:, :1] - 3.5).square().mul(15).expand(1, -1, 16)
    values, weights = torch.cat((straight, rough, rough, bent)), torch.ones(4, 512, device=device)
    weights[2] = 0  # no image shows it
    stored, side, ranges = storing._at_few_vertices(
        values, weights, {side: storing._fit_and_spread(side, values) for side in storing._SIDES}
    )
    assert side.tolist()[:3] == [2, 8, 2]
    assert 2 < side[3] < 8
    assert len(stored) == (side.long() ** 3).sum()
    # The corners of a straight function are exact up to the rounding of codes and of ranges.
    codes = torch.stack((stored[:8] & 15, stored[:8] >> 4), dim=-1).flatten(1)
    least, greatest = ranges[0].float()
    corners = straight[0][[0, 7, 56, 63, 448, 455, 504, 511]]
    own = least + (greatest - least) * codes / 15
    assert ((own - corners).abs() <= (greatest - least) / 30 + 1).all()


def test_hidden_and_empty_vertices_do_not_count(device):
    thickness = torch.zeros(1, 8, 8, 8, device=device)
    thickness[:, 4:] = 20.0
    visible = storing._visibility(thickness.flatten(1)).view(8, 8, 8)
    assert (visible[:3] == 0).all()
    assert (visible[3:5] == 1).all()
    assert (visible[5:7, 1:7, 1:7] < 1e-6).all()
    assert (visible[7] == 1).all(), "what is behind the last face is not known"


def test_corrected_vertices_have_the_mean_of_a_curve(device):
    """Neighbouring blocks agree on the vertices that they share, and chords on a parabola, up to the error left."""
    x = torch.arange(15.0, device=device)
    curve = x.square()[:, None, None].expand(-1, 8, 8)
    blocks = torch.stack((curve[:8], curve[7:])).reshape(2, 512, 1)
    known = torch.ones(2, 512, dtype=torch.bool, device=device)
    first, second = storing._corrected(blocks, known).view(2, 8, 8, 8)
    assert torch.equal(first[7], second[0])
    # Between vertices, a chord of a parabola is 1/6 above it in the mean.
    assert torch.allclose(first[1:7], curve[1:7] - 2 * storing._CORRECTION)
    assert 0 < storing._CORRECTION <= 1 / 12


def test_densities_that_are_not_finite_show_in_their_pixels_alone(device):
    field = make_field(device, None)
    occupancy, black = half_empty(field), torch.zeros(3, device=device)
    bricks = bake(field, occupancy)
    clean = FieldRenderer(field, occupancy, SETTINGS, black).view(look_at(device), 0)
    density = bricks.density.clone()
    density.view(-1)[bricks.density.flatten().argmax()] = 255
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("voxelfield.rendering.backends.bake", lambda *_: replace(bricks, density=density))
        broken = FieldRenderer(field, occupancy, SETTINGS, black).view(look_at(device), 0)
    hit = ~broken.opacity.isfinite()
    assert 0 < hit.sum() < hit.numel() / 4
    assert (~broken.rgb.isfinite()).all(dim=-1).equal(hit)
    assert torch.equal(broken.rgb[~hit], clean.rgb[~hit])
    assert replace(bricks, density=density).unpacked()[0].isnan().sum() == 1


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
    log_density, values = bricks.unpacked()
    stored = int((bricks.blocks >= 0).sum()) * 512 * (2 + 16)
    assert stored_bytes(field, occupancy, per_voxel) == stored <= log_density.nbytes + values.nbytes


def test_unpacked_values_are_those_that_are_drawn(device):
    field = make_field(device, None, 12)
    occupancy = half_empty(field)
    bricks = bake(field, occupancy)
    own, stored = bricks.unpacked()[1], Stored(field, bricks)
    unit = torch.rand(500, 3, device=device)
    placed = atlas_coordinates(unit, bricks.blocks, bricks.density.shape)
    positions = bricks.aabb[0] + unit * (bricks.aabb[1] - bricks.aabb[0])
    read = bricks.low + bricks.extent * ops.sample_trilinear(own / 255.0, placed)
    inside = ~placed.isnan().any(dim=1)
    assert 0.2 < inside.float().mean() < 1
    differences = (read[:, : stored._count] - stored._values(positions))[inside] / bricks.extent[: stored._count]
    assert differences.abs().mean() < 0.01


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
        ({"values": lambda v: v[:, :2].contiguous()}, "values must be 8 or 16 for each vertex, got 4"),
        ({"density": lambda d: d.float()}, "density must be"),
        ({"ranges": lambda r: r[:-1]}, "ranges must have shape"),
        ({"values": lambda v: v[:9]}, "values must have 74 to 2\\^31 - 2 vertices, got 9"),
        ({"clip": lambda _: None}, "clip must be given if and only if there are no boxes"),
    ],
)
def test_bricks_of_another_form_are_refused(device, change, message):
    field, cameras = make_field(device, None), look_at(device)
    occupancy = half_empty(field)
    bricks = bake(field, occupancy)
    tensors = stored_tensors(field, bricks)
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
    stored = stored_tensors(field, bricks)

    def render(height):
        intrinsics = torch.tensor([30.0, 30.0, 1.0, height - 8.0], device=device)
        return render_baked_image(c2w, intrinsics, 2, height, occupancy.bits, occupancy.aabb, step=0.1, **stored)

    expected = render(16)
    assert expected[1].any()
    for tall, low in zip(render(16 * 65_535 + 32), expected, strict=True):
        assert torch.equal(tall[-len(low) :], low)


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
