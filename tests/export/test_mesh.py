"""A field's surface as meshes and points: places, normals, colours, and files that other programs read."""

from __future__ import annotations

import json
import math
import re
import struct
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from balls import BOX, CENTRE, RADIUS, VOXELS, ball_field, cameras_around, expected_colors, radius_at
from file_limits import files_at_most
from torch.nn import functional as F

from voxelfield.export.mesh import MESH, FieldSurface, close_holes, decimate, keep_largest_component
from voxelfield.export.mesh_file import Mesh, Texture, save_mesh, save_points
from voxelfield.export.surfaces import half_absorbing_density
from voxelfield.models import Model, Sampling
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.warps.nested_boxes import NestedBoxes

trimesh = pytest.importorskip("trimesh")
pytest.importorskip("skimage")

VOXEL = 40.0 / VOXELS
SAMPLING = Sampling(voxels_per_step=0.5)


def surface_of(**options) -> FieldSurface:
    return FieldSurface(Model(*ball_field(), SAMPLING), **options)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return surface_of().mesh()


def opened(path: Path):
    """What trimesh makes of a file, with every complaint an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return trimesh.load(path, process=False)


def radii(points: torch.Tensor) -> torch.Tensor:
    return (points - CENTRE).norm(dim=-1)


def test_a_mesh_lies_at_the_level_in_the_units_of_the_data(mesh):
    field, _ = ball_field()
    expected = radius_at(field, half_absorbing_density(2 * VOXEL))
    assert abs(expected - RADIUS) > 0.1 * VOXEL  # the level matters
    # Trilinear interpolation of a distance is a little larger than the distance.
    assert (radii(mesh.vertices) - expected).abs().max() < 0.02 * VOXEL


@pytest.mark.parametrize("level", [0.05, 3.0])
def test_another_level_is_another_surface(level):
    found = surface_of(level=level).vertices
    assert (radii(found) - radius_at(ball_field()[0], level)).abs().max() < 0.02 * VOXEL


def test_normals_and_colors_are_those_of_the_field(mesh):
    outwards = F.normalize(mesh.vertices - CENTRE, dim=-1)
    assert (mesh.normals * outwards).sum(dim=-1).min() > 0.999
    assert (mesh.colors.float() / 255 - expected_colors(mesh.vertices)).abs().max() < 0.01


def test_resolution_is_of_the_longest_edge():
    counts = [len(surface_of(resolution=cells).faces) for cells in (15, 30)]
    assert counts[1] == pytest.approx(4 * counts[0], rel=0.1)


@pytest.mark.parametrize("name", ["a\nf 1 2 3.obj", "a\r.obj", "a\u2028b.obj", "a\n.ply"])
def test_a_name_that_would_be_lines_of_a_file_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="path must be a file whose name is one line, got '") as caught:
        save_mesh(tmp_path / name, textured(1))
    assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def y_up(vectors: torch.Tensor, turned: bool = True) -> torch.Tensor:
    """Vectors in axes of which y points up instead of z, x being the same."""
    x, y, z = vectors.unbind(-1)
    return torch.stack((x, z, -y), dim=-1) if turned else vectors


def tree_of(path: Path) -> dict:
    """The description of a GLB."""
    content = path.read_bytes()
    return json.loads(content[20 : 20 + struct.unpack_from("<I", content, 12)[0]])


@pytest.mark.parametrize("up", [0, 1, None])
def test_what_points_up_in_the_photographs_does_so_in_a_glb(tmp_path, caplog, up):
    def training_cameras() -> Cameras:
        if up is None:
            raise FileNotFoundError("no scene")
        cameras = cameras_around(8, 32)
        cameras.c2w[:, :3, 1] = torch.eye(3)[up]
        return cameras

    source = SimpleNamespace(model=Model(*ball_field(), SAMPLING), training_cameras=training_cameras)
    source.once = lambda function, **options: function(source, **options)
    MESH.write(tmp_path / "ball.glb", source)
    middle = opened(tmp_path / "ball.glb").bounds.mean(axis=0)
    assert middle[1] == pytest.approx(float(CENTRE[2 if up is None else up]), abs=0.1 * VOXEL)
    assert ("z is taken to point up" in caplog.text) == (up is None)


@pytest.mark.parametrize("up_axis", [None, "y", "z"])
@pytest.mark.parametrize("suffix", [".ply", ".obj", ".glb"])
def test_files_hold_what_they_are_given_with_either_axis_up(mesh, tmp_path, suffix, up_axis):
    path = tmp_path / "new" / f"ball{suffix}"
    save_mesh(path, mesh, *([] if up_axis is None else [up_axis]))
    found = opened(path)
    if suffix == ".glb":
        # Beside a material, trimesh keeps vertices' colours as an attribute.
        (found,) = found.geometry.values()
        colors = torch.tensor(found.visual.vertex_attributes["color"])[:, :3].float() / 255
        colors = torch.where(colors <= 0.0031308, 12.92 * colors, 1.055 * colors ** (1 / 2.4) - 0.055)
        tolerance = 0.02
    else:
        colors, tolerance = torch.tensor(found.visual.vertex_colors)[:, :3].float() / 255, 1e-6
    up_is_y = (up_axis or ("y" if suffix == ".glb" else "z")) == "y"
    assert torch.allclose(torch.tensor(found.vertices).float(), y_up(mesh.vertices, up_is_y), atol=1e-4)
    assert torch.equal(torch.tensor(found.faces).long(), mesh.faces)
    assert torch.allclose(torch.tensor(found.vertex_normals).float(), y_up(mesh.normals, up_is_y), atol=1e-4)
    assert (colors - mesh.colors.float() / 255).abs().max() <= tolerance
    assert found.is_watertight
    assert found.volume == pytest.approx(4 / 3 * math.pi * float(radii(mesh.vertices).mean()) ** 3, rel=0.01)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_glb_asks_for_no_light_and_for_both_sides(mesh, tmp_path):
    for each in (mesh, textured(1)):
        save_mesh(tmp_path / "ball.glb", each)
        tree = tree_of(tmp_path / "ball.glb")
        (found,), (material,) = tree["meshes"], tree["materials"]
        assert found["primitives"][0]["material"] == 0
        assert "KHR_materials_unlit" in material["extensions"]
        assert material["doubleSided"] is True
        assert tree["extensionsUsed"] == ["KHR_materials_unlit"]


def test_meshes_are_named_like_their_files(tmp_path):
    save_mesh(tmp_path / "harbour.glb", textured(1))
    save_mesh(tmp_path / "harbour.obj", textured(1))
    tree = tree_of(tmp_path / "harbour.glb")
    assert tree["meshes"][0]["name"] == tree["materials"][0]["name"] == "harbour"
    assert "harbour" in [node["name"] for node in tree["nodes"]]
    lines = (tmp_path / "harbour.obj").read_text().splitlines()
    assert {"o harbour", "usemtl harbour", "mtllib harbour.mtl"} <= set(lines)


def test_the_material_of_an_obj_leaves_its_picture_as_it_is(tmp_path):
    save_mesh(tmp_path / "white.obj", textured(1))
    lines = (line.split() for line in (tmp_path / "white.mtl").read_text().splitlines())
    values = {line[0]: line[1:] for line in lines if line}
    assert [float(value) for value in values["Kd"]] == [1, 1, 1]
    assert [float(value) for value in values["Ks"]] == [0, 0, 0]


def test_points_are_even_on_the_surface_and_colored(tmp_path):
    cloud = surface_of().points(20_000)
    save_points(tmp_path / "ball.ply", cloud)
    found = opened(tmp_path / "ball.ply")
    points = torch.tensor(found.vertices).float()
    assert torch.allclose(points, cloud.points, atol=1e-4)
    assert torch.equal(torch.tensor(found.colors)[:, :3], cloud.colors)
    outwards = F.normalize(points - CENTRE, dim=-1)
    assert outwards.mean(dim=0).abs().max() < 0.02
    assert (outwards.square().mean(dim=0) - 1 / 3).abs().max() < 0.01
    assert (cloud.normals * outwards).sum(dim=-1).min() > 0.99
    assert (cloud.colors.float() / 255 - expected_colors(points)).abs().max() < 0.01
    assert torch.equal(surface_of().points(20_000).points, cloud.points)
    assert not torch.equal(surface_of().points(20_000, seed=1).points, cloud.points)


def test_fewer_faces_keep_the_shape_and_the_colors(mesh):
    small = surface_of().mesh(max_faces=500)
    assert 400 <= len(small.faces) <= 500 < len(mesh.faces)
    assert (radii(small.vertices) - radii(mesh.vertices).mean()).abs().max() < VOXEL
    assert (small.colors.float() / 255 - expected_colors(small.vertices)).abs().max() < 0.05
    unchanged = surface_of().mesh(max_faces=10**6)
    assert torch.equal(unchanged.faces, mesh.faces)


def test_the_unit_does_not_matter_for_merging():
    vertices, faces = surface_of().vertices, surface_of().faces
    for unit in (1e-3, 1e3):
        merged, left = decimate(unit * vertices, faces, 500)
        assert len(left) <= 500
        assert (radii(merged / unit) - radii(vertices).mean()).abs().max() < 0.3 * VOXEL


def test_what_merging_triangles_breaks_off_is_left_out_again(monkeypatch):
    def merge(vertices, faces, most):
        far = vertices[:3] + 100.0
        return torch.cat((vertices, far)), torch.cat((faces, torch.arange(3)[None] + len(vertices)))

    monkeypatch.setattr("voxelfield.export.mesh.decimate", merge)
    whole = surface_of().mesh()
    assert surface_of().mesh(max_faces=10, min_component=0).vertices.max() > 50
    kept = surface_of().mesh(max_faces=10, largest_component=True)
    assert torch.equal(kept.vertices, whole.vertices)
    assert len(kept.faces) == len(whole.faces)


def test_the_largest_component_is_that_of_the_largest_area():
    # Many small triangles beside one large one.
    large = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
    small = torch.rand(30, 3) * 0.1 + 20
    faces = torch.cat((torch.tensor([[30, 31, 32]]), torch.tensor([[i, i + 1, i + 2] for i in range(28)])))
    vertices, kept = keep_largest_component(torch.cat((small, large)), faces)
    assert torch.equal(vertices[kept[0]], large)
    assert kept.shape == (1, 3)


def test_small_loose_parts_are_left_out_and_counted(caplog):
    surface = surface_of()
    count = len(surface.faces)
    area = trimesh.Trimesh(surface.vertices.numpy(), surface.faces.numpy(), process=False).area
    square, two = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]), torch.tensor([[0, 1, 2], [0, 2, 3]])
    for share in (0.0005, 0.002):
        surface.faces = torch.cat((surface.faces, two + len(surface.vertices)))
        surface.vertices = torch.cat((surface.vertices, math.sqrt(share * area) * square + CENTRE))
    for options, left_out in (({"min_component": 0}, 0), ({}, 1), ({"min_component": 0.01}, 2)):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert len(surface.mesh(**options).faces) == count + 2 * (2 - left_out)
        assert (f"left out {left_out} of 3 loose parts" in caplog.text) == (left_out > 0)


def test_holes_are_filled_without_moving_anything(mesh):
    top = mesh.vertices[mesh.faces][:, :, 2].amin(dim=1) > CENTRE[2] + 0.8 * RADIUS
    open_faces = mesh.faces[~top]
    assert not trimesh.Trimesh(mesh.vertices.numpy(), open_faces.numpy(), process=False).is_watertight
    faces = close_holes(mesh.vertices, open_faces)
    assert torch.equal(faces[: len(open_faces)], open_faces)
    closed = trimesh.Trimesh(mesh.vertices.numpy(), faces.numpy(), process=False)
    assert closed.is_watertight
    assert closed.is_winding_consistent


def half_lost() -> float:
    """The radius at which a ray towards the centre has lost half of its light."""
    field, _ = ball_field()
    radius = torch.linspace(RADIUS, 0, 10_001, dtype=torch.float64)
    density = field.density(CENTRE + radius[:, None].float() * torch.tensor([0.0, 0.0, 1.0])).double()
    return float(radius[(density.cumsum(0) * RADIUS / 10_000 > math.log(2)).nonzero()[0, 0]])


def test_fused_depth_lies_where_half_of_the_light_is_lost():
    fused = surface_of(kind="tsdf", cameras=cameras_around(24, 64))
    assert (radii(fused.vertices) - half_lost()).abs().mean() < 0.15 * VOXEL
    assert (radii(fused.vertices) - half_lost()).abs().max() < 0.4 * VOXEL
    mesh = fused.mesh()
    outwards = F.normalize(mesh.vertices - CENTRE, dim=-1)
    assert (mesh.normals * outwards).sum(dim=-1).mean() > 0.98
    assert trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), process=False).is_watertight


def test_fused_depth_ends_where_cameras_see_nothing():
    camera = cameras_around(24, 64)[:1]
    fused = surface_of(kind="tsdf", cameras=camera)
    ahead = (fused.vertices - CENTRE) @ camera.c2w[0, :3, 2]
    # From a finite distance, a camera sees less than half of a ball.
    assert float(ahead.min()) > 0
    assert float(ahead.max()) == pytest.approx(half_lost(), abs=0.2 * VOXEL)
    assert not trimesh.Trimesh(fused.vertices.numpy(), fused.faces.numpy(), process=False).is_watertight


def test_lenses_are_left_out_of_depth_maps():
    pinholes = cameras_around(8, 32)
    lens = Lens("perspective", torch.full((8, 6), 0.1))
    bent = Cameras(pinholes.c2w, pinholes.intrinsics, 32, 32, lens)
    straight, found = (surface_of(kind="tsdf", cameras=cameras) for cameras in (pinholes, bent))
    assert torch.equal(found.vertices, straight.vertices)


@pytest.mark.parametrize("suffix", [".obj", ".glb"])
def test_a_texture_shows_the_fields_colors(tmp_path, suffix):
    pytest.importorskip("xatlas")
    mesh = surface_of().mesh(max_faces=600, texture=128)
    path = tmp_path / f"ball{suffix}"
    save_mesh(path, mesh)
    found = opened(path)
    if suffix == ".glb":
        (found,) = found.geometry.values()
        image = found.visual.material.baseColorTexture
    else:
        image = found.visual.material.image
        assert {file.suffix for file in tmp_path.iterdir()} == {".obj", ".mtl", ".png"}
    assert len(found.faces) == len(mesh.faces) <= 600
    # In the middle of triangles, where no vertex determines the colour.
    middles = torch.tensor(found.triangles_center).float()
    if suffix == ".glb":
        middles = torch.stack((middles[:, 0], -middles[:, 2], middles[:, 1]), dim=-1)
    places = torch.tensor(found.visual.uv)[torch.tensor(found.faces)].mean(dim=1)
    width, height = image.size
    assert width == height == 128
    pixels = torch.tensor(np.asarray(image.convert("RGB"))).float() / 255
    column, row = (places[:, 0] * width).long(), ((1 - places[:, 1]) * height).long()
    off = (pixels[row, column] - expected_colors(middles)).abs()
    assert off.mean() < 0.02
    assert off.max() < 0.1


def textured(shade: int) -> Mesh:
    """A square whose picture takes more bytes than its description."""
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    generator = torch.Generator().manual_seed(shade)
    texture = Texture(corners[:, :2], torch.randint(0, 255, (16, 16, 3), dtype=torch.uint8, generator=generator))
    normals = torch.tensor([[0.0, 0, 1]]).repeat(4, 1)
    return Mesh(corners, torch.tensor([[0, 1, 2], [0, 2, 3]]), normals, torch.zeros(4, 3, dtype=torch.uint8), texture)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_full_disk_leaves_no_part_of_an_obj_and_keeps_the_one_before(tmp_path):
    save_mesh(tmp_path / "whole.obj", textured(1))
    sizes = sorted({path.stat().st_size for path in tmp_path.iterdir()})
    assert len(sizes) == 3
    before = contents(tmp_path)
    for size in sizes:
        for name in ("whole", "new"):
            with files_at_most(size - 1), pytest.raises(OSError, match=rf"File too large: '.*/{name}\.(obj|mtl|png)'"):
                save_mesh(tmp_path / f"{name}.obj", textured(2))
            assert contents(tmp_path) == before
    save_mesh(tmp_path / "whole.obj", textured(2))
    assert contents(tmp_path).keys() == before.keys()
    assert contents(tmp_path)["whole.png"] != before["whole.png"]


@pytest.mark.parametrize("suffix", [".png", ".mtl"])
def test_an_obj_does_not_replace_a_picture_of_something_else(tmp_path, suffix):
    (tmp_path / f"photo{suffix}").write_text("mine")
    with pytest.raises(FileExistsError, match=rf"photo\.obj must have a name .*, got photo\{suffix} that belong"):
        save_mesh(tmp_path / "photo.obj", textured(1))
    assert contents(tmp_path) == {f"photo{suffix}": b"mine"}
    save_mesh(tmp_path / "photo.glb", textured(1))


@pytest.mark.parametrize("kind", ["density", "tsdf"])
def test_every_device_finds_the_surface_and_its_colors(device, kind):
    field, occupancy = (module.to(device) for module in ball_field())
    surface = FieldSurface(Model(field, occupancy, SAMPLING), kind=kind, cameras=cameras_around(24, 32))
    mesh, cloud = surface.mesh(), surface.points(100)
    expected = half_lost() if kind == "tsdf" else radius_at(field, half_absorbing_density(2 * VOXEL))
    for points, colors in ((mesh.vertices, mesh.colors), (cloud.points, cloud.colors)):
        assert points.device == colors.device == torch.device("cpu")
        assert (radii(points) - expected).abs().max() < 0.5 * VOXEL
        assert (colors.float() / 255 - expected_colors(points)).abs().max() < 0.02


BOXES = NestedBoxes(BOX, 3)


@pytest.mark.parametrize(("number", "reach"), [(1, 1.0), (2, 2.0), (3, 4.0)])
def test_nested_boxes_have_surfaces_in_world_units(monkeypatch, number, reach):
    model = Model(*ball_field(BOXES), SAMPLING)
    monkeypatch.setattr("voxelfield.export.lattice.CHUNK", 5000)
    surface = FieldSurface(model, level=1.0, box=number)
    assert (radii(surface.vertices) - radius_at(ball_field()[0], 1.0)).abs().max() < 0.05 * VOXEL
    finest = FieldSurface(model, level=1.0)
    assert len(surface.faces) == pytest.approx(len(finest.faces) / reach**2, rel=0.15)


def test_an_export_says_where_a_nested_box_cuts_through_the_surface(caplog):
    model = Model(*ball_field(BOXES), SAMPLING)
    FieldSurface(model, level=1.0)
    assert not caplog.records  # the whole ball is inside
    (low, (_, y, z)), middle = BOX, float(CENTRE[0])
    cut = Model(*ball_field(NestedBoxes((low, (middle, y, z)), 3)), SAMPLING)
    FieldSurface(cut, level=1.0)
    (record,) = caplog.records
    assert re.fullmatch(r"box 1 cuts through .* at its faces x\+: --box 2 .*", record.getMessage())
    caplog.clear()
    FieldSurface(cut, level=1.0, box=3)
    assert not caplog.records  # there is no larger box


def test_nested_boxes_are_fused_in_world_units():
    model = Model(*ball_field(BOXES), SAMPLING)
    found = FieldSurface(model, kind="tsdf", cameras=cameras_around(24, 64)).vertices
    assert (radii(found) - half_lost()).abs().mean() < 0.15 * VOXEL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "poisson"}, r"surface must be one of \['density', 'tsdf'\], got 'poisson'"),
        ({"level": 0.0}, "level must be a density above 0, got 0"),
        ({"level": float("nan")}, "level must be a density above 0, got nan"),
        ({"kind": "tsdf", "level": 1.0}, "level must be left out for surface tsdf, which has none, got 1"),
        ({"resolution": 0}, "resolution must be an int of at least 1, got 0"),
        ({"box": 0}, "box must be 1 to 1, as many as the field has, got 0"),
        ({"box": 2}, "box must be 1 to 1, as many as the field has, got 2"),
        ({"level": 1e6}, "level must be a density that the field reaches, got 1e+06"),
        ({"kind": "tsdf"}, "cameras must be at least one for surface tsdf, got none"),
    ],
)
def test_what_makes_no_sense_is_named(options, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        surface_of(**options)


def test_cameras_that_see_nothing_are_named():
    away = cameras_around(2, 8)
    away.c2w[:, :3, 3] += 1000
    with pytest.raises(ValueError, match="cameras must see a surface for surface tsdf"):
        surface_of(kind="tsdf", cameras=away)


def test_other_endings_and_impossible_numbers_are_refused(mesh, tmp_path):
    surface = surface_of()
    with pytest.raises(ValueError, match=r"path must be a file \*.ply, \*.obj, \*.glb, got .*stl"):
        save_mesh(tmp_path / "ball.stl", mesh)
    with pytest.raises(ValueError, match=r"path must be a file \*.ply, got .*xyz"):
        save_points(tmp_path / "ball.xyz", surface.points(1))
    for name, make in (("count", surface.points), ("max_faces", lambda count: surface.mesh(max_faces=count))):
        with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got 0"):
            make(0)
    with pytest.raises(ValueError, match=r"min_component must lie in \[0, 1\), got 1"):
        surface.mesh(min_component=1)
