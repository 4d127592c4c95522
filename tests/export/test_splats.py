"""3D Gaussians of a field, their images, and their files as other programs read them."""

from __future__ import annotations

import gzip
import json
import math
import struct
import zipfile
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from balls import BOX, CENTRE, RADIUS, ball_field, cameras_around, expected_colors
from torch.nn import functional as F

from voxelfield.export import splat_rendering
from voxelfield.export.splat_file import Splats, save_splats
from voxelfield.export.splat_rendering import render_splats
from voxelfield.export.splats import splats_of
from voxelfield.fields.decoders import SHDecoder, spherical_harmonics
from voxelfield.fields.field import RadianceField
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.models import Model, Sampling
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import render
from voxelfield.rendering.rigid import quaternions, rotations
from voxelfield.warps.nested_boxes import NestedBoxes

VOXEL = 1.0
SAMPLING = Sampling(voxels_per_step=0.5)
INNER = tuple(tuple(float(c + sign * 10) for c in CENTRE) for sign in (-1, 1))  # smaller than the ball


def ball() -> Model:
    return Model(*ball_field(), SAMPLING)


def random_splats(count: int) -> Splats:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Splats(draw(count, 3), draw(count, 3) - 3, draw(count, 4), draw(count), 0.3 * draw(count, 16, 3))


def shown_colors(splats: Splats, directions: torch.Tensor) -> torch.Tensor:
    return 0.5 + (spherical_harmonics(directions, 3)[..., None] * splats.harmonics).sum(dim=1)


def test_a_ply_has_the_usual_layout(tmp_path):
    plyfile = pytest.importorskip("plyfile")
    splats = random_splats(7)
    save_splats(tmp_path / "a.ply", splats)
    read = plyfile.PlyData.read(str(tmp_path / "a.ply"))
    (vertex,) = read.elements
    assert (read.text, read.byte_order, vertex.name, vertex.count) == (False, "<", "vertex", 7)
    assert [each.name for each in vertex.properties][:6] == ["x", "y", "z", "nx", "ny", "nz"]
    assert len(vertex.properties) == 62

    def columns(*names: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([vertex[name] for name in names], axis=-1))

    assert torch.equal(columns("x", "y", "z"), splats.means)
    assert torch.equal(columns("scale_0", "scale_1", "scale_2"), splats.log_scales)
    assert torch.equal(columns("opacity")[:, 0], splats.opacity_logits)
    assert torch.allclose(columns(*(f"rot_{i}" for i in range(4))), F.normalize(splats.rotations, dim=-1))
    assert torch.equal(columns("f_dc_0", "f_dc_1", "f_dc_2"), splats.harmonics[:, 0])
    for channel in range(3):
        rest = columns(*(f"f_rest_{15 * channel + i}" for i in range(15)))
        assert torch.equal(rest, splats.harmonics[:, 1:, channel])


def spz_sections(content: bytes, version: int) -> tuple[tuple[int, ...], list[bytes]]:
    """The header, and positions, opacities, colours and so on, by the layout of github.com/nianticlabs/spz."""
    if version == 3:
        content = gzip.decompress(content)
        ends = np.cumsum([16, *(50 * size for size in (9, 1, 3, 3, 4, 45))])
        assert len(content) == ends[-1]
        return struct.unpack_from("<IIIBBBB", content), [content[begin:end] for begin, end in pairwise(ends)]
    zstandard = pytest.importorskip("zstandard")
    *header, streams, start = struct.unpack_from("<IIIBBBBI", content)
    assert streams == 6
    sizes = [struct.unpack_from("<QQ", content, start + 16 * index) for index in range(streams)]
    ends = np.cumsum([start + 16 * streams, *(packed for packed, _ in sizes)])
    assert len(content) == ends[-1]
    parts = [zstandard.decompress(content[begin:end]) for begin, end in pairwise(ends)]
    assert [len(part) for part in parts] == [whole for _, whole in sizes]
    return (*header, 0), parts


@pytest.mark.parametrize("version", [3, 4])
def test_an_spz_holds_the_same_numbers_in_fewer_bits(tmp_path, version):
    pytest.importorskip("gaussforge")
    splats = random_splats(50)
    save_splats(tmp_path / "a.spz", splats, "z", **({"spz_version": 3} if version == 3 else {}))
    header, sections = spz_sections((tmp_path / "a.spz").read_bytes(), version)
    assert header[:4] == (0x5053474E, version, 50, 3)
    assert header[5] == 0
    positions, opacities, colors, scales, turns, rest = (
        np.frombuffer(part, np.uint8).reshape(50, -1).astype(np.float64) for part in sections
    )
    fixed = positions.reshape(50, 3, 3) @ [1, 2**8, 2**16]
    fixed -= 2**24 * (fixed >= 2**23)
    assert np.allclose(fixed / 2 ** header[4], splats.means, atol=2**-12)
    assert np.allclose(opacities[:, 0] / 255, splats.opacity_logits.sigmoid(), atol=1 / 500)
    assert np.allclose((colors / 255 - 0.5) / 0.15, splats.harmonics[:, 0], atol=0.5 / 255 / 0.15 + 1e-6)
    assert np.allclose(scales / 16 - 10, splats.log_scales, atol=1 / 31)
    # Five bits for the first band, four for the others.
    expected = splats.harmonics[:, 1:].flatten(1).clamp(-1, 1)
    for band, step in ((slice(0, 9), 1 / 16), (slice(9, 45), 1 / 8)):
        assert np.allclose((rest / 128 - 1)[:, band], expected[:, band], atol=step)
    # The index of the largest of x, y, z, w, then the others as signs and nine bits of a root of one half.
    packed, xyzw = (turns @ 256.0 ** np.arange(4)).astype(np.int64), np.zeros((50, 4))
    for row, bits in zip(xyzw, packed, strict=True):
        bits_left = int(bits)
        for axis in (3, 2, 1, 0):
            if axis != bits >> 30:
                row[axis] = (-1) ** (bits_left >> 9 & 1) * (bits_left & 511) / 511 / math.sqrt(2)
                bits_left >>= 10
        row[bits >> 30] = math.sqrt(1 - (row**2).sum())
    assert_same_axes(torch.from_numpy(np.roll(xyzw, 1, axis=-1)).float(), splats.rotations)


def test_a_glb_has_the_numbers_that_the_extension_asks_for(tmp_path):
    splats = random_splats(50)
    save_splats(tmp_path / "a.glb", splats, "z")
    content = (tmp_path / "a.glb").read_bytes()
    magic, version, size, length, kind = struct.unpack_from("<4sIII4s", content)
    assert (magic, version, size, kind) == (b"glTF", 2, len(content), b"JSON")
    scene = json.loads(content[20 : 20 + length])
    data_length, data_kind = struct.unpack_from("<I4s", content, 20 + length)
    assert (data_kind, 28 + length + data_length) == (b"BIN\0", size)
    (primitive,) = scene["meshes"][0]["primitives"]
    assert (primitive["mode"], primitive["extensions"]["KHR_gaussian_splatting"]["kernel"]) == (0, "ellipse")

    def read(name: str) -> torch.Tensor:
        accessor = scene["accessors"][primitive["attributes"][name]]
        view = scene["bufferViews"][accessor["bufferView"]]
        begin = 28 + length + view["byteOffset"]
        assert accessor["componentType"] == 5126
        rows = np.frombuffer(content[begin : begin + view["byteLength"]], np.float32)
        return torch.from_numpy(rows.reshape(50, -1).copy())

    assert torch.equal(read("POSITION"), splats.means)
    assert torch.allclose(read("KHR_gaussian_splatting:SCALE"), splats.log_scales.exp())
    assert torch.allclose(read("KHR_gaussian_splatting:OPACITY")[:, 0], splats.opacity_logits.sigmoid())
    turns = F.normalize(splats.rotations, dim=-1).roll(-1, dims=-1)
    assert torch.allclose(read("KHR_gaussian_splatting:ROTATION"), turns)
    assert torch.equal(read("KHR_gaussian_splatting:SH_DEGREE_3_COEF_6"), splats.harmonics[:, 15])
    assert torch.equal(read("KHR_gaussian_splatting:SH_DEGREE_1_COEF_0"), splats.harmonics[:, 1])


def test_openusd_reads_a_usdz_without_complaint(tmp_path):
    usd = pytest.importorskip("pxr.Usd")
    from pxr import UsdGeom, UsdValidation, UsdVol

    splats = random_splats(50)
    for up in ("y", "z"):
        save_splats(tmp_path / f"{up}.usdz", splats, up)
        stage = usd.Stage.Open(str(tmp_path / f"{up}.usdz"))
        assert UsdGeom.GetStageUpAxis(stage) == up.upper()
        validators = UsdValidation.ValidationRegistry().GetOrLoadAllValidators()
        assert [error.GetMessage() for error in UsdValidation.ValidationContext(validators).Validate(stage)] == []
    prim = UsdVol.ParticleField3DGaussianSplat(stage.GetDefaultPrim())
    assert np.array_equal(prim.GetPositionsAttr().Get(), splats.means)
    assert np.allclose(prim.GetScalesAttr().Get(), splats.log_scales.exp())
    assert np.allclose(prim.GetOpacitiesAttr().Get(), splats.opacity_logits.sigmoid())
    w, x, y, z = F.normalize(splats.rotations[3], dim=-1).tolist()
    turn = prim.GetOrientationsAttr().Get()[3]
    assert (turn.real, *turn.imaginary) == pytest.approx((w, x, y, z))
    assert np.array_equal(prim.GetRadianceSphericalHarmonicsCoefficientsAttr().Get(), splats.harmonics.flatten(0, 1))


def test_a_sog_has_all_gaussians(tmp_path):
    forge = pytest.importorskip("gaussforge").GaussForge()
    splats = random_splats(300)
    save_splats(tmp_path / "a.sog", splats)
    with zipfile.ZipFile(tmp_path / "a.sog") as file:
        meta = json.loads(file.read("meta.json"))
    assert meta["count"] == 300
    read = forge.read((tmp_path / "a.sog").read_bytes(), "sog")["data"]
    means = torch.from_numpy(np.frombuffer(read["positions"], np.float32).reshape(-1, 3).copy())
    assert float(torch.cdist(splats.means, means, compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1).max()) < 1e-3


def test_turned_splats_look_the_same_from_a_turned_camera():
    axes = rotations(F.normalize(torch.tensor([[0.3, -0.5, 0.7, 0.2]]), dim=-1))[0]
    splats = random_splats(40)
    turned = splats.turned(axes)
    directions = F.normalize(torch.randn(40, 3, generator=torch.Generator().manual_seed(2)), dim=-1)
    assert torch.allclose(shown_colors(turned, directions @ axes.T), shown_colors(splats, directions), atol=1e-5)
    assert torch.allclose(turned.means, splats.means @ axes.T)
    assert_same_axes(turned.rotations, quaternions(axes @ rotations(F.normalize(splats.rotations, dim=-1))))


def test_formats_whose_specification_has_y_up_have_y_up(tmp_path):
    trimesh = pytest.importorskip("trimesh")
    splats = random_splats(9)
    save_splats(tmp_path / "a.glb", splats)
    x, y, z = splats.means.unbind(dim=-1)
    (cloud,) = trimesh.load(tmp_path / "a.glb").geometry.values()
    assert np.allclose(cloud.vertices, torch.stack((x, z, -y), dim=-1), atol=1e-6)


def assert_same_axes(read: torch.Tensor, expected: torch.Tensor) -> None:
    """Axes of a Gaussian may point either way, and are within a degree or so."""
    cosines = (rotations(F.normalize(read, dim=-1)) * rotations(F.normalize(expected, dim=-1))).sum(dim=-2)
    assert float(cosines.abs().min()) > 0.9998


def test_wrong_splats_are_not_written(tmp_path):
    splats = random_splats(2)
    with pytest.raises(ValueError, match=r"path must be a file \*.spz, \*.sog, \*.ply, \*.glb, \*.usdz, got"):
        save_splats(tmp_path / "a.splat", splats)
    splats.means[0, 0] = 1e8
    with pytest.raises(ValueError, match=r"within 2048 units of the origin, .* for an SPZ, got one at 1e\+08"):
        save_splats(tmp_path / "a.spz", splats)
    splats.means[0, 0] = 0
    splats.log_scales[0, 0] = 7
    with pytest.raises(ValueError, match=r"from 4\.6e-5 to 370 units .* to 1\.1e\+03 with a median of .*: write a PLY"):
        save_splats(tmp_path / "a.spz", splats)
    splats.means[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="splats must be finite"):
        save_splats(tmp_path / "a.ply", splats)
    assert not list(tmp_path.iterdir())


def test_a_rotated_gaussian_has_the_shadow_of_its_points():
    rotation = pytest.importorskip("scipy.spatial.transform").Rotation.from_rotvec([0.7, -0.4, 1.1])
    x, y, z, w = rotation.as_quat()
    scales = torch.tensor([0.3, 0.1, 0.02])
    centre = torch.tensor([0.2, -0.1, 0.3])
    turn, faint = 2 * torch.tensor([[w, x, y, z]]).float(), torch.tensor([-1.0])
    one = Splats(centre[None], scales.log()[None], turn, faint, torch.zeros(1, 16, 3))
    camera = Cameras(torch.eye(4)[None].clone(), torch.tensor([[3000.0, 3200.0, 60.0, 70.0]]), 130, 140)
    camera.c2w[0, 2, 3] = 80.0  # so far that perspective is linear
    shadow = 2 * (1 - render_splats(one, camera, torch.ones(3), 0.01)[..., 0])  # its own colour is 0.5
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(400_000, 3, generator=generator) * scales
    points = centre + points @ torch.from_numpy(rotation.as_matrix()).float().T
    depth = 80.0 - points[:, 2]
    image = torch.stack((60 + 3000 * points[:, 0] / depth, 70 - 3200 * points[:, 1] / depth), dim=-1)
    rows, columns = torch.meshgrid(torch.arange(140) + 0.5, torch.arange(130) + 0.5, indexing="ij")
    pixels, weights = torch.stack((columns, rows), dim=-1).view(-1, 2), shadow.reshape(-1, 1)
    mean = (weights * pixels).sum(dim=0) / weights.sum()
    covariance = (weights * (pixels - mean)).T @ (pixels - mean) / weights.sum()
    assert torch.allclose(mean, image.mean(dim=0), atol=0.1)
    # Viewers widen each Gaussian, and leave out its faintest part.
    assert torch.allclose(covariance, image.T.cov() + 0.3 * torch.eye(2), rtol=0.08, atol=0.4)
    assert float(shadow.max()) == pytest.approx(1 / (1 + math.e), abs=0.005)


def test_the_nearer_gaussian_is_in_front():
    harmonics = torch.zeros(2, 16, 3)
    harmonics[0, 0], harmonics[1, 0, 0] = 1.5, -1.5  # white in front, behind it blue-green
    splats = Splats(
        torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        torch.full((2, 3), -1.0),
        torch.tensor([1.0, 0, 0, 0]).repeat(2, 1),
        torch.full((2,), 10.0),
        harmonics,
    )
    camera = Cameras(torch.eye(4)[None].clone(), torch.tensor([[40.0, 40.0, 8.5, 8.5]]), 17, 17)
    camera.c2w[0, 2, 3] = 4.0
    for order in ([0, 1], [1, 0]):
        shown = render_splats(splats[torch.tensor(order)], camera, torch.zeros(3), 0.01)[8, 8]
        white = 0.5 + 1.5 * 0.5 / math.sqrt(math.pi)
        behind = torch.tensor([0.5 - 1.5 * 0.5 / math.sqrt(math.pi), 0.5, 0.5])
        assert torch.allclose(shown, 0.99 * white + 0.01 * 0.99 * behind, atol=1e-3)


def test_few_pairs_at_once_give_the_same_image(monkeypatch):
    splats = random_splats(300)
    camera = Cameras(torch.eye(4)[None].clone(), torch.tensor([[20.0, 20.0, 12.0, 10.0]]), 24, 20)
    camera.c2w[0, 2, 3] = 6.0
    whole = render_splats(splats, camera, torch.ones(3), 0.01)
    most, examined = 1 << 9, []

    def examine(*arguments: torch.Tensor | int) -> torch.Tensor:
        examined.append(len(arguments[1]))
        return alphas(*arguments)

    alphas = splat_rendering._alphas
    monkeypatch.setattr(splat_rendering, "_CHUNK", most)
    monkeypatch.setattr(splat_rendering, "_alphas", examine)
    assert torch.allclose(render_splats(splats, camera, torch.ones(3), 0.01), whole, atol=2e-4)
    *without_derivative, visible = examined
    assert max(without_derivative) == most
    assert 0 < visible < sum(without_derivative)


@pytest.mark.parametrize("warp", [None, NestedBoxes(INNER, 2)], ids=["one", "nested"])
def test_gaussians_are_flat_on_the_surface_and_grow_outwards(warp):
    splats = splats_of(Model(*ball_field(warp), SAMPLING), cameras_around(8, 48), count=20_000, fit_steps=0)
    arms = splats.means - CENTRE
    assert (arms.norm(dim=-1) - RADIUS).abs().mean() < 0.8 * VOXEL
    assert torch.allclose(shown_colors(splats, -F.normalize(arms, dim=-1)), expected_colors(splats.means), atol=0.1)
    opaque = splats.opacity_logits > 0
    assert int(opaque.sum()) > 1000  # the area of the ball is 1810 voxels
    # The shortest axis is the surface's normal.
    scales, order = splats.log_scales.exp().sort(dim=-1)
    axes = rotations(splats.rotations).mT[torch.arange(len(order)), order[:, 0]]
    cosines = (axes * F.normalize(arms, dim=-1)).sum(dim=-1).abs()
    assert float(cosines[opaque].median()) > 0.9
    assert float((scales[opaque, 0] / scales[opaque, 2]).median()) < 0.75
    if warp is not None:
        inside = (arms.abs().amax(dim=-1) < 9) & opaque
        outside = (arms.abs().amax(dim=-1) > 11) & opaque
        assert float(scales[outside, 2].median() / scales[inside, 2].median()) == pytest.approx(2, rel=0.2)


def opacities(splats: Splats, cameras: Cameras, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Opacities (H, W) of splats and of the field in the first image, so large that viewers widen little."""
    camera = cameras[[0]].enlarged(4)
    rays = camera.image_rays(0, model.field.aabb)
    truth = render(model.field, rays, model.occupancy, model.settings).opacity
    black = replace(splats, harmonics=torch.zeros_like(splats.harmonics).index_fill_(1, torch.tensor(0), -10.0))
    shown = 1 - render_splats(black, camera, torch.ones(3), 0.01)[..., 0]
    return shown, truth.view(shown.shape)


def test_fog_is_as_opaque_as_in_the_field():
    model = ball()
    field = model.field
    with torch.no_grad():  # light is lost gradually, all the way through
        distance = (field.grid.vertices() - CENTRE).norm(dim=-1)
        fog = math.log(math.expm1(0.08 / field.decoder.activation.scale)) - field.decoder.activation.shift
        field.grid.features[..., 0] = torch.where(distance < RADIUS, fog, -20.0)
    cameras = cameras_around(8, 48)
    splats = splats_of(model, cameras, count=8_000, fit_steps=0)
    shown, truth = opacities(splats, cameras, model)
    assert 0.7 < float(truth.max()) < 0.95
    assert float((shown - truth)[truth > 0.3].abs().mean()) < 0.03


def test_few_gaussians_are_larger_instead_of_leaving_holes():
    model, cameras = ball(), cameras_around(8, 48)
    splats = splats_of(model, cameras, count=300, fit_steps=0)
    assert 100 < len(splats) <= 300
    shown, truth = opacities(splats, cameras, model)
    assert float(shown[truth > 0.99].mean()) > 0.8


def test_colours_depend_on_the_direction_as_in_the_field():
    plain, occupancy = ball_field()
    grid = VoxelGrid(plain.grid.resolution, 13, BOX)
    with torch.no_grad():
        grid.features[..., :1] = plain.grid.features[..., :1]
        grid.features[..., 1:] = torch.tensor([0.0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    field = RadianceField(grid, SHDecoder(1, plain.decoder.activation)).requires_grad_(False)
    cameras = cameras_around(24, 32)
    splats = splats_of(Model(field, occupancy, SAMPLING), cameras, count=5000, fit_steps=0)
    seen = splats[splats.opacity_logits > 0]
    towards = F.normalize(seen.means - CENTRE, dim=-1)
    # From a camera that faces the surface.
    nearest = (towards @ F.normalize(cameras.c2w[:, :3, 3] - CENTRE, dim=-1).T).argmax(dim=-1)
    directions = F.normalize(seen.means - cameras.c2w[nearest, :3, 3], dim=-1)
    error = shown_colors(seen, directions) - field(seen.means, directions)[1]
    assert float(error.abs().mean()) < 0.02


def test_fitting_brings_images_closer_to_the_fields(monkeypatch):
    monkeypatch.setattr("voxelfield.export.splats._ZOOMS", (1,))  # for speed
    model, cameras = ball(), cameras_around(6, 32)
    rays = cameras.image_rays(0, model.field.aabb)
    with torch.no_grad():
        truth = render(model.field, rays, model.occupancy, model.settings).over(torch.ones(3)).view(32, 32, 3)
    errors = []
    for steps in (0, 15):
        splats = splats_of(model, cameras, count=2000, fit_steps=steps)
        assert 200 < len(splats) <= 2000
        assert not any(each.requires_grad for each in vars(splats).values())
        errors.append(float((render_splats(splats, cameras[[0]], torch.ones(3), 0.01) - truth).square().mean()))
    assert errors[1] < 0.7 * errors[0]


def test_wrong_arguments_are_named():
    model, cameras = ball(), cameras_around(2, 16)
    for given, options, message in (
        (cameras, {"count": 0}, "count must be an int of at least 1, got 0"),
        (cameras, {"fit_steps": -1}, "fit_steps must be finite and not negative, got -1"),
        (cameras[[]], {"count": 100}, "cameras must be at least one, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            splats_of(model, given, **options)
    model.occupancy.occupied[:] = False
    with pytest.raises(ValueError, match="cameras must see the field, got empty space in all of their pixels"):
        splats_of(model, cameras, count=100)
    model.field.extra_inputs = ("time",)
    with pytest.raises(ValueError, match="position and direction alone, got one that needs time"):
        splats_of(model, cameras, count=100)
