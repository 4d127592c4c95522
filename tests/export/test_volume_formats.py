"""Volumes in the formats of other programs: positions and values as these read them, and grids made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from balls import CENTRE, RADIUS, ball_field, expected_colors

import voxelfield
from voxelfield.export import volume_nvdb
from voxelfield.export.registry import check_files, formats
from voxelfield.export.volume import save_volume
from voxelfield.installed import MissingPackageError
from voxelfield.models import Model

LIBRARIES = {".npz": "numpy", ".nvdb": "warp", ".nii": "nibabel", ".nii.gz": "nibabel"}


@pytest.fixture
def positions() -> torch.Tensor:
    """Positions of points of the lattice with 11 points along y, in and around the ball."""
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randint(2, count - 2, (40,), generator=generator) for count in (9, 11, 9)], dim=-1)
    return torch.tensor([280.0, -225.0, 30.0]) + 5.0 * index


@pytest.fixture
def written(tmp_path):
    """A function that writes a ball in a format, or skips the test if the format's library is missing."""

    def write(suffix: str):
        pytest.importorskip(LIBRARIES[suffix])
        path = tmp_path / f"ball{suffix}"
        save_volume(path, Model(*ball_field()), resolution=10)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        return path

    return write


def assert_is_the_ball(points: torch.Tensor, density: torch.Tensor, rgb: torch.Tensor) -> None:
    inside = (points - CENTRE).norm(dim=-1) < RADIUS
    assert 5 < int(inside.sum()) < 35
    assert torch.allclose(density, ball_field()[0].density(points), rtol=1e-3, atol=1e-4)
    assert (rgb - expected_colors(points))[inside].abs().max() < 0.01


@pytest.mark.parametrize("suffix", LIBRARIES)
def test_a_volume_becomes_a_grid_at_the_same_place(written, positions, suffix):
    grid = voxelfield.load_volume(written(suffix))
    assert torch.allclose(grid.voxel_size, torch.tensor(5.0))
    if suffix != ".nvdb":  # whose box has whole tiles
        assert grid.resolution == (9, 11, 9)
        assert torch.allclose(grid.aabb, torch.tensor([[280.0, -225.0, 30.0], [320.0, -175.0, 70.0]]))
    assert grid.features.requires_grad
    values = grid(positions).detach()
    assert_is_the_ball(positions, values[:, 0], values[:, 1:])


def test_nibabel_finds_the_values_at_their_positions(written, positions):
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.load(written(".nii.gz"))
    assert (image.shape, nibabel.aff2axcodes(image.affine)) == ((9, 11, 9, 1, 4), ("R", "A", "S"))
    index = np.rint(nibabel.affines.apply_affine(np.linalg.inv(image.affine), positions.numpy())).astype(int)
    values = torch.from_numpy(image.get_fdata(dtype=np.float32)[tuple(index.T)][:, 0])
    assert_is_the_ball(positions, values[:, 0], values[:, 1:])


def test_warp_finds_two_grids_with_names_and_stores_only_tiles_with_density(tmp_path, written):
    warp = pytest.importorskip("warp")
    path = written(".nvdb")
    density = warp.Volume.load_from_nvdb(path.read_bytes(), device="cpu")
    color = density.load_next_grid()
    assert [grid.get_grid_info().name for grid in (density, color)] == ["density", "color"]
    assert color.load_next_grid() is None
    assert density.get_voxel_size() == pytest.approx((5.0, 5.0, 5.0))
    assert list(density.get_grid_info().translation) == [280.0, -225.0, 30.0]
    field, occupancy = ball_field()
    occupancy.occupied[:, :, 4:] = False
    save_volume(tmp_path / "half.nvdb", Model(field, occupancy), resolution=40)
    half = warp.Volume.load_from_nvdb((tmp_path / "half.nvdb").read_bytes(), device="cpu")
    highest = half.get_tiles().numpy().max(axis=0)[2]
    assert highest == 0, "z beyond a quarter of the box is empty"


def test_a_medical_volume_may_have_other_directions_and_one_value(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    affine = np.array([[-2.0, 0, 0, 10], [0, 0, 3, -5], [0, 4, 0, 1], [0, 0, 0, 1]])  # left, superior, anterior
    nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "ct.nii.gz")
    grid = voxelfield.load_volume(tmp_path / "ct.nii.gz")
    assert (grid.channels, grid.resolution) == (1, (2, 4, 3))
    index = torch.tensor([[0, 0, 0], [1, 2, 3], [0, 1, 2]])
    points = index.double() @ torch.from_numpy(affine[:3, :3]).T + torch.from_numpy(affine[:3, 3])
    assert torch.allclose(grid(points.float())[:, 0], torch.from_numpy(values)[tuple(index.T)])
    affine[0, 1] = 1.0
    nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "tilted.nii")
    with pytest.raises(ValueError, match=r"tilted.nii must have the axes of the world, got the affine \[\["):
        voxelfield.load_volume(tmp_path / "tilted.nii")


@pytest.mark.parametrize("suffix", LIBRARIES)
def test_files_that_are_no_volumes_are_named(tmp_path, suffix):
    pytest.importorskip(LIBRARIES[suffix])
    path = tmp_path / f"a{suffix}"
    with pytest.raises(FileNotFoundError):
        voxelfield.load_volume(path)
    path.write_bytes(b"no volume at all")
    with pytest.raises(ValueError, match=rf"a{suffix} must be "):
        voxelfield.load_volume(path)


def test_other_suffixes_and_flat_volumes_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"path must be a file \*.npz, \*.nii, \*.nii.gz, \*.nvdb, got a.vdb"):
        voxelfield.load_volume("a.vdb")
    np.savez(tmp_path / "flat.npz", density=np.zeros((1, 4, 4), np.float32), aabb=np.array([[0, 0, 0], [1, 1, 1]]))
    with pytest.raises(ValueError, match=r"flat.npz must have at least 2 points along each axis, got 1 x 4 x 4"):
        voxelfield.load_volume(tmp_path / "flat.npz")


@pytest.mark.parametrize(
    ("name", "suffix", "extra"),
    [
        ("volume", "nvdb", "nvdb"),
        ("volume", "nii.gz", "nifti"),
        ("splats", "spz", "splats"),
        ("splats", "sog", "splats"),
        ("splats", "usdz", "usd"),
    ],
)
def test_a_missing_library_is_an_error_that_names_the_extra_before_anything_is_computed(
    monkeypatch, name, suffix, extra
):
    def missing(module: str):
        raise ModuleNotFoundError("missing", name=module)

    formats()  # imports the modules of formats
    volume_nvdb._warp.cache_clear()
    monkeypatch.setattr("voxelfield.installed.importlib.import_module", missing)
    with pytest.raises(MissingPackageError, match=rf'pip install "voxelfield\[{extra}\]"'):
        check_files({name: Path(f"a.{suffix}")}, {})
