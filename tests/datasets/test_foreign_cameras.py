"""Cameras of Metashape, RealityCapture, Polycam and Record3D: written from a known scene, they are its cameras."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

import voxelfield
from voxelfield.datasets.registry import scene_in
from voxelfield.datasets.scene import Split
from voxelfield.rendering.rigid import quaternions

COUNT, SIDE = 6, 200
FX, FY, CX, CY = 270.0, 264.0, 104.0, 97.5
K, P = (-0.08, 0.03, -0.01, 0.002), (0.004, -0.003)
# A component of Metashape: its frame is smaller, turned and elsewhere.
TURN, SHIFT, SCALE = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]).double(), (3.0, -2.0, 5.0), 4.0

Write = Callable[..., None]


@pytest.fixture(scope="module")
def split() -> Split:
    train = voxelfield.load_scene("bricks").train
    cameras = train.cameras[list(range(COUNT))]
    cameras.intrinsics[:] = torch.tensor([FX, FY, CX, CY])
    return Split(train.images[:COUNT], cameras, tuple(f"view_{index:02d}" for index in range(COUNT)))


def opencv(split: Split) -> npt.NDArray[np.float64]:
    """Poses (N, 4, 4), camera to world, x right, y down, looking along z."""
    return split.cameras.c2w.double().numpy() * np.array([1.0, -1, -1, 1])


def write_images(folder: Path, split: Split, names: list[str]) -> None:
    folder.mkdir(parents=True)
    for name, image in zip(names, split.images, strict=True):
        Image.fromarray(image.numpy()).save(folder / f"{name}.png")


def words(values: Any) -> str:
    return " ".join(repr(float(value)) for value in np.asarray(values).reshape(-1))


def write_metashape(folder: Path, split: Split, kind: str = "frame", centre: Any = None, **terms: float) -> None:
    """Writes a component whose transform takes its cameras to the scene, or to a place on Earth."""
    write_images(folder / "images", split, list(split.names))
    turn, shift = TURN.numpy(), np.array(SHIFT)
    inside = opencv(split)
    inside[:, :3, 3] = (inside[:, :3, 3] - shift) @ turn / SCALE
    inside[:, :3, :3] = turn.T @ inside[:, :3, :3]
    if centre is not None:
        axes, middle = centre
        turn, shift = axes @ turn, axes @ shift + middle
    known = {"f": FY, "cx": CX - SIDE / 2, "cy": CY - SIDE / 2, "b1": FX - FY} | terms
    terms_xml = "".join(f"<{key}>{value!r}</{key}>" for key, value in known.items())
    size = f'<resolution width="{SIDE}" height="{SIDE}"/>'
    cameras = "".join(
        f'<camera id="{index}" sensor_id="0" component_id="0" label="{name}"><transform>{words(pose)}</transform>'
        "<rotation_covariance>1 0 0 0 1 0 0 0 1</rotation_covariance></camera>"
        for index, (name, pose) in enumerate(zip(split.names, inside, strict=True))
    )
    (folder / "my cameras.xml").write_text(
        '<?xml version="1.0" encoding="UTF-8"?>\n<document version="2.0.0"><chunk label="Chunk 1" enabled="true">'
        f'<sensors next_id="1"><sensor id="0" label="unknown" type="{kind}">{size}'
        f'<calibration type="{kind}" class="initial">{size}<f>1</f></calibration>'
        f'<calibration type="{kind}" class="adjusted">{size}{terms_xml}</calibration></sensor></sensors>'
        '<components next_id="1" active_id="0"><component id="0"><transform>'
        f'<rotation locked="false">{words(turn)}</rotation><translation locked="false">{words(shift)}</translation>'
        f'<scale locked="false">{SCALE}</scale></transform></component></components>'
        f'<cameras next_id="9">{cameras}<camera id="7" sensor_id="0" label="unaligned"/></cameras></chunk></document>'
    )


def write_realitycapture(folder: Path, split: Split, **changed: Any) -> None:
    write_images(folder, split, list(split.names))
    for name, c2w in zip(split.names, opencv(split), strict=True):
        entries: dict[str, Any] = {
            **{"Version": 3, "PosePrior": "initial", "Coordinates": "absolute", "DistortionModel": "brown3"},
            **{"FocalLength35mm": 36 * FX / SIDE, "Skew": 0, "AspectRatio": FY / FX, "InTexturing": 1},
            **{"PrincipalPointU": CX / SIDE - 0.5, "PrincipalPointV": CY / SIDE - 0.5},
            **({"DistortionCoeficients": "0 0 0 0 0 0"} | changed),
        }
        attributes = " ".join(f'xcr:{key}="{value}"' for key, value in entries.items())
        (folder / f"{name}.xmp").write_text(
            '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
            f'<rdf:Description xmlns:xcr="http://www.capturingreality.com/ns/xcr/1.1#" {attributes}>'
            f"<xcr:Rotation>{words(c2w[:3, :3].T)}</xcr:Rotation><xcr:Position>{words(c2w[:3, 3])}</xcr:Position>"
            "</rdf:Description></rdf:RDF></x:xmpmeta>"
        )


def with_y_up(split: Split) -> npt.NDArray[np.float64]:
    """Poses (N, 4, 4) in ARKit's world, OpenGL's axes of the cameras."""
    return split.cameras.c2w.double().numpy()[:, [1, 2, 0, 3]]


def write_polycam(folder: Path, split: Split, corrected: str = "corrected_", **changed: Any) -> None:
    write_images(folder / "keyframes" / f"{corrected}images", split, list(split.names))
    (folder / "keyframes" / f"{corrected}cameras").mkdir()
    (folder / "keyframes" / "depth").mkdir()
    for name, c2w in zip(split.names, with_y_up(split), strict=True):
        camera = {"fx": FX, "fy": FY, "cx": CX, "cy": CY, "width": SIDE, "height": SIDE, "blur_score": 90.0}
        camera |= {f"t_{row}{column}": c2w[row, column] for row in range(3) for column in range(4)}
        path = folder / "keyframes" / f"{corrected}cameras" / f"{name}.json"
        path.write_text(json.dumps(camera | changed))
        Image.new("I;16", (50, 50), 1250).save(folder / "keyframes" / "depth" / f"{name}.png")


def write_record3d(
    folder: Path, split: Split, file: str = "metadata.json", images: str = "rgb", **changed: Any
) -> None:
    write_images(folder / images, split, list(map(str, range(COUNT))))
    c2w = torch.from_numpy(with_y_up(split))
    poses = torch.cat((quaternions(c2w[:, :3, :3])[:, [1, 2, 3, 0]], c2w[:, :3, 3]), dim=1)
    meta = {"w": SIDE, "h": SIDE, "fps": 60, "K": [FX, 0, 0, 0, FY, 0, CX, CY, 1], "poses": poses.tolist()}
    (folder / file).write_text(json.dumps(meta | changed))


FORMATS: dict[str, Write] = {
    "Metashape": write_metashape,
    "RealityCapture or RealityScan": write_realitycapture,
    "Polycam": write_polycam,
    "Record3D": write_record3d,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_cameras_are_those_that_were_written(tmp_path, split, name, caplog):
    FORMATS[name](tmp_path / "mine", split)
    assert scene_in(tmp_path / "mine").formats[0].name == name
    train = voxelfield.load_scene(tmp_path / "mine", holdout=0).train
    assert torch.equal(train.images, split.images)
    torch.testing.assert_close(train.cameras.c2w, split.cameras.c2w, atol=2e-6, rtol=0)
    torch.testing.assert_close(train.cameras.intrinsics, split.cameras.intrinsics, rtol=1e-6, atol=1e-5)
    assert train.cameras.lens is None
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    half = voxelfield.load_scene(tmp_path / "mine", holdout=0, downscale=2).train
    torch.testing.assert_close(half.cameras.intrinsics, split.cameras.intrinsics / 2, rtol=1e-6, atol=1e-5)


def brown(x: Any, y: Any, r: Any, k: tuple[float, ...], p_of_x: float, p_of_y: float) -> tuple[Any, Any]:
    """The formula that both programs document; the tangential coefficients differ in their order."""
    radial = 1 + k[0] * r**2 + k[1] * r**4 + k[2] * r**6 + k[3] * r**8
    return (
        x * radial + p_of_x * (r**2 + 2 * x**2) + 2 * p_of_y * x * y,
        y * radial + p_of_y * (r**2 + 2 * y**2) + 2 * p_of_x * x * y,
    )


@pytest.mark.parametrize("name", ["frame", "fisheye", "spherical", "brown4t2"])
def test_points_are_seen_where_the_programs_document_it(tmp_path, split, name):
    terms = {f"k{index}": value for index, value in enumerate(K, 1)} | {"p1": P[0], "p2": P[1]}
    if name == "brown4t2":
        write_realitycapture(tmp_path / "mine", split, DistortionModel=name, DistortionCoeficients=words((*K, *P)))
    else:
        write_metashape(tmp_path / "mine", split, name, **terms)
    scene = voxelfield.load_scene(tmp_path / "mine", holdout=0)
    points = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).double() - 0.5
    for index, c2w in enumerate(opencv(split)):
        x, y, z = ((points.numpy() - c2w[:3, 3]) @ c2w[:3, :3]).T
        if name == "spherical":
            pixels = (
                SIDE / 2 + SIDE / (2 * math.pi) * np.arctan2(x, z),
                SIDE / 2 + SIDE / math.pi * np.arctan2(y, np.hypot(x, z)),
            )
        else:
            x, y = x / z, y / z
            r = np.hypot(x, y)
            if name == "fisheye":
                x, y, r = x * np.arctan(r) / r, y * np.arctan(r) / r, np.arctan(r)
            # OpenCV's p2, which RealityCapture calls t2, is Metashape's P1.
            x, y = brown(x, y, r, K, *(reversed(P) if name == "brown4t2" else P))
            pixels = CX + FX * x, CY + FY * y
        at = torch.from_numpy(np.stack(pixels, axis=-1)).float()
        rays = scene.train.cameras.rays(torch.full((len(at),), index), at, scene.aabb)
        towards = points.float() - rays.origins
        closest = towards - (towards * rays.directions).sum(dim=-1, keepdim=True) * rays.directions
        assert closest.norm(dim=-1).max() < 1e-4


def test_a_chunk_on_earth_is_east_north_and_up(tmp_path, split, caplog):
    caplog.set_level("INFO")
    latitude, longitude = math.radians(47.0), math.radians(8.0)
    up = np.array([math.cos(latitude) * math.cos(longitude), math.cos(latitude) * math.sin(longitude), 0.7313537016])
    east = np.array([-math.sin(longitude), math.cos(longitude), 0])
    normal = 6378137**2 / math.sqrt((6378137 * math.cos(latitude)) ** 2 + (6356752.314245 * up[2]) ** 2)
    place = normal * up * np.array([1, 1, (6356752.314245 / 6378137) ** 2])
    write_metashape(tmp_path / "mine", split, centre=(np.stack((east, np.cross(up, east), up), axis=1), place))
    found = voxelfield.load_scene(tmp_path / "mine", holdout=0).train.cameras.c2w
    assert "metres east, north and up of 47.0000" in caplog.text
    torch.testing.assert_close(found[:, :3, :3], split.cameras.c2w[:, :3, :3], atol=1e-5, rtol=0)
    offsets = [poses[:, :3, 3] - poses[0, :3, 3] for poses in (found, split.cameras.c2w)]
    torch.testing.assert_close(*offsets, atol=1e-4, rtol=0)


def test_what_the_apps_have_beside_images_is_read(tmp_path, split, caplog):
    write_polycam(tmp_path / "polycam", split, corrected="")
    depth = voxelfield.load_scene(tmp_path / "polycam", holdout=0, depth=True).train.extras["depth"]
    assert depth.unique().tolist() == [1.25]
    assert "without corrected images, poses are those of the device" in caplog.text
    own = [[FX + index, FY, CX, CY] for index in range(COUNT)]
    write_record3d(tmp_path / "r3d", split, "metadata", "rgbd", perFrameIntrinsicCoeffs=own, lidar=2)
    train = voxelfield.load_scene(tmp_path / "r3d", holdout=0).train
    torch.testing.assert_close(train.cameras.intrinsics, torch.tensor(own))
    assert "these keys have no effect: 'lidar'" in caplog.text


def edit(file: str, pattern: str, by: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert re.search(pattern, text), pattern
        (folder / file).write_text(re.sub(pattern, by, text))

    return change


XML, XMP = "my cameras.xml", "view_03.xmp"
BAD: dict[str, tuple[str, dict[str, Any], Callable[[Path], None] | None, str]] = {
    "another coefficient": ("Metashape", {"p3": 0.1}, None, "sensor 0: p3 must be absent or 0 in a calibration"),
    "skew": ("Metashape", {"b2": 3.0}, None, "b2 must move pixels by at most 0.5, got 1.14: fix it at 0"),
    "another projection": ("Metashape", {"kind": "cylindrical"}, None, "or spherical, got 'cylindrical'"),
    "no pose": ("Metashape", {}, edit(XML, "<camera .*</camera>", ""), "cameras must have a transform, got none"),
    "a sensor missing": ("Metashape", {}, edit(XML, 'sensor_id="0"', 'sensor_id="5"'), "be among the sensors, got '5'"),
    "words": ("Metashape", {}, edit(XML, "<cx>", "<cx>x"), "sensor 0: cx: must hold numbers only"),
    "entities": (
        "Metashape",
        {},
        edit(XML, "<document", '<!DOCTYPE d [<!ENTITY a "b">]><document'),
        "defines entities",
    ),
    "half a file": ("Metashape", {}, edit(XML, "</document>", ""), "my cameras.xml: not valid XML"),
    "a mirror": ("Metashape", {}, edit(XML, "<rotation locked[^<]*", "<rotation>1 0 0 0 1 0 0 0 -1"), "mirror image"),
    "division": (
        *("RealityCapture or RealityScan", {"DistortionModel": "division", "DistortionCoeficients": "0.1 0 0 0 0 0"}),
        *(None, "xcr:DistortionModel must be one of brown3, brown4, brown3t2, brown4t2, got 'division'"),
    ),
    "a skewed sensor": ("RealityCapture or RealityScan", {"Skew": 0.1}, None, "xcr:Skew must be 0, got 0.1"),
    "no rotation": (
        *("RealityCapture or RealityScan", {}, edit(XMP, "<xcr:Rotation>.*</xcr:Rotation>", "")),
        "view_03.xmp: must have xcr:Rotation",
    ),
    "text for a number": ("Polycam", {"fx": "270"}, None, "'fx' must be a list of 1 numbers, got"),
    "no pixels": ("Polycam", {"width": 0, "height": 0}, None, "view_00.json must have a size of at least 1x1, got 0x0"),
    "no poses": ("Record3D", {"poses": []}, None, "'poses' must be a list with entries, got"),
    "short quaternions": ("Record3D", {"poses": [[0.3] * 7] * COUNT}, None, "pose 0 must be a rotation"),
    "few intrinsics": ("Record3D", {"perFrameIntrinsicCoeffs": [[1, 1, 1, 1]]}, None, "one entry for each of the pos"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_understood_is_refused_in_one_line(tmp_path, split, case):
    name, changed, change, message = BAD[case]
    FORMATS[name](tmp_path / "mine", split, **changed)
    if change is not None:
        change(tmp_path / "mine")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        voxelfield.load_scene(tmp_path / "mine")
    assert "\n" not in str(caught.value)
