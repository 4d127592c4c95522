"""Small sound scenes of every format, as files in memory, and what a loaded scene must be like."""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from voxelfield.datasets.scene import Scene
from voxelfield.warps.choice import WarpConfig, choose_warp

Files = dict[str, bytes]
"""What a folder holds, by path."""

WIDTH, HEIGHT, VIEWS = 6, 4, 4
_FLIP = np.diag([1.0, -1.0, -1.0, 1.0])


def _pose(index: int) -> np.ndarray:
    """A camera on a circle, looking at the origin; OpenGL axes."""
    angle = 2 * math.pi * index / VIEWS + 0.3
    backward = np.array([math.cos(angle), math.sin(angle), 0.5])
    backward /= np.linalg.norm(backward)
    right = np.cross([0.0, 0.0, 1.0], backward)
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3] = np.stack((right, np.cross(backward, right), backward, 3 * backward), axis=-1)
    return pose


def _image(index: int) -> bytes:
    pixels = np.random.default_rng(index).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png")
    return file.getvalue()


def _frames(folder: str) -> list[dict[str, object]]:
    return [{"file_path": f"{folder}/v{i}.png", "transform_matrix": _pose(i).tolist()} for i in range(VIEWS)]


def _blender() -> Files:
    meta = json.dumps({"camera_angle_x": 0.8, "frames": _frames("train")}).encode()
    return {f"train/v{i}.png": _image(i) for i in range(VIEWS)} | {"transforms_train.json": meta}


def _nerfstudio() -> Files:
    known = {"w": WIDTH, "h": HEIGHT, "fl_x": 8.0, "fl_y": 8.5, "cx": 3.0, "cy": 2.0, "camera_model": "OPENCV"}
    terms = {"k1": 0.01, "k2": 0.0, "p1": 0.001, "p2": 0.0}
    splits = {"train_filenames": ["images/v1.png", "images/v2.png"], "test_filenames": ["images/v0.png"]}
    frames = _frames("images")
    frames[1]["mask_path"] = "masks/v1.png"
    meta = json.dumps({**known, **terms, **splits, "frames": frames}).encode()
    images = {f"images/v{i}.png": _image(i) for i in range(VIEWS)}
    return images | {"transforms.json": meta, "masks/v1.png": _image(7)}


def _pose_that_faces_one_way(index: int) -> np.ndarray:
    """A camera of a row that looks along -z, a little turned; OpenGL axes."""
    angle = 0.05 * (index - 1)
    pose = np.eye(4)
    pose[0, :3], pose[2, :3] = (math.cos(angle), 0, math.sin(angle)), (-math.sin(angle), 0, math.cos(angle))
    pose[:3, 3] = 0.2 * index, 0.05 * index * index, 0.02 * index
    return pose


def _llff(pose: Callable[[int], np.ndarray] = _pose) -> Files:
    rows = []
    for i in range(VIEWS):
        right, up, backwards, position = pose(i)[:3].T
        matrix = np.stack((-up, right, backwards, position, [HEIGHT, WIDTH, 8.0]), axis=-1)
        rows.append([*matrix.reshape(-1), 1.0, 6.0])
    file = io.BytesIO()
    np.save(file, np.array(rows))
    return {f"images/v{i}.png": _image(i) for i in range(VIEWS)} | {"poses_bounds.npy": file.getvalue()}


def _nsvf() -> Files:
    files = {"intrinsics.txt": b"8 0 3 0\n0 8.5 2 0\n0 0 1 0\n0 0 0 1\n", "bbox.txt": b"-1 -1.25 -1.5 2 2.25 2.5 0.4\n"}
    for i in range(VIEWS):
        text = "\n".join(" ".join(map(repr, row)) for row in (_pose(i) @ _FLIP).tolist())
        files |= {
            f"rgb/{'2' if i == 0 else '0'}_v{i}.png": _image(i),
            f"pose/{'2' if i == 0 else '0'}_v{i}.txt": text.encode(),
        }
    return files


def _neus() -> Files:
    pixels = np.array([[8, 0, 2.5, 0], [0, 8.5, 1.5, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    sphere = np.diag([2.0, 2.0, 2.0, 1.0])
    file = io.BytesIO()
    world = {f"world_mat_{i}": pixels @ np.linalg.inv(_pose(i) @ _FLIP @ sphere) for i in range(VIEWS)}
    np.savez(file, **world, **{f"scale_mat_{i}": sphere for i in range(VIEWS)})
    pictures = {f"{folder}/{i:03d}.png": _image(i) for i in range(VIEWS) for folder in ("image", "mask")}
    return pictures | {"cameras_sphere.npz": file.getvalue()}


def _colmap_text() -> Files:
    import pycolmap  # after Pillow: in the other order, PNG files are not written

    lines: dict[str, list[str]] = {"cameras": [f"1 OPENCV {WIDTH} {HEIGHT} 8 8.5 3 2 0.01 0 0.001 0"], "images": []}
    for i in range(VIEWS):
        w2c = np.linalg.inv(_pose(i) @ _FLIP)
        x, y, z, w = pycolmap.Rotation3d(w2c[:3, :3]).quat
        lines["images"] += [f"{i + 1} {w} {x} {y} {z} {' '.join(map(str, w2c[:3, 3]))} 1 v{i}.png"]
        # The first image shows the points, each at a place of its own.
        lines["images"] += [" ".join(f"{k}.5 2.5 {k if i == 0 else -1}" for k in range(1, 6))]
    points = np.random.default_rng(0).uniform(-1, 2, (5, 3)).tolist()
    lines["points3D"] = [f"{k + 1} {x} {y} {z} 255 0 9 0.5 1 {k}" for k, (x, y, z) in enumerate(points)]
    text = {f"sparse/0/{name}.txt": ("\n".join(content) + "\n").encode() for name, content in lines.items()}
    return {f"images/v{i}.png": _image(i) for i in range(VIEWS)} | text


def _colmap_binary() -> Files:
    import pycolmap

    files = _colmap_text()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), files)
        model = pycolmap.Reconstruction(Path(folder, "sparse/0"))
        out = Path(folder, "binary")
        out.mkdir()
        model.write_binary(out)
        binary = {f"sparse/0/{path.name}": path.read_bytes() for path in out.iterdir()}
    return {name: content for name, content in files.items() if name.startswith("images/")} | binary


def _words(values: object) -> str:
    return " ".join(repr(float(value)) for value in np.asarray(values).reshape(-1))


def _metashape() -> Files:
    size = f'<resolution width="{WIDTH}" height="{HEIGHT}"/>'
    terms = "<f>8.5</f><cx>0.1</cx><cy>0</cy><b1>-0.5</b1><k1>0.01</k1><p1>0.001</p1>"
    cameras = "".join(
        f'<camera sensor_id="0" label="v{i}"><transform>{_words(_pose(i) @ _FLIP)}</transform></camera>'
        for i in range(VIEWS)
    )
    xml = (
        f'<document version="2.0.0"><chunk><sensors><sensor id="0" type="frame">{size}<calibration class="adjusted">'
        f"{size}{terms}</calibration></sensor></sensors><cameras>{cameras}</cameras><transform><rotation>"
        f"{_words(np.eye(3))}</rotation><translation>1 2 3</translation><scale>2</scale></transform></chunk></document>"
    )
    return {f"v{i}.png": _image(i) for i in range(VIEWS)} | {"cameras.xml": xml.encode()}


def _realitycapture() -> Files:
    files = {}
    for i in range(VIEWS):
        c2w = _pose(i) @ _FLIP
        xmp = (
            '<x><d xmlns:xcr="http://www.capturingreality.com/ns/xcr/1.1#" xcr:DistortionModel="brown3" xcr:Skew="0" '
            'xcr:FocalLength35mm="48" xcr:PrincipalPointU="0.1" xcr:DistortionCoeficients="0.01 0 0 0 0 0">'
            f"<xcr:Rotation>{_words(c2w[:3, :3].T)}</xcr:Rotation>"
            f"<xcr:Position>{_words(c2w[:3, 3])}</xcr:Position></d></x>"
        )
        files |= {f"v{i}.png": _image(i), f"v{i}.xmp": xmp.encode()}
    return files


def _polycam() -> Files:
    files = {}
    for i in range(VIEWS):
        camera = {"fx": 8.0, "fy": 8.5, "cx": 3.0, "cy": 2.0, "width": WIDTH, "height": HEIGHT, "blur_score": 90}
        camera |= {f"t_{row}{column}": float(_pose(i)[row, column]) for row in range(3) for column in range(4)}
        files[f"keyframes/corrected_cameras/{i}.json"] = json.dumps(camera).encode()
        files[f"keyframes/corrected_images/{i}.png"] = _image(i)
    return files


def _record3d() -> Files:
    poses = [[0.0, math.sin(0.7 * i), 0.0, math.cos(0.7 * i), float(i), 0.5, 1.0] for i in range(VIEWS)]
    meta = {"w": WIDTH, "h": HEIGHT, "K": [8, 0, 0, 0, 8.5, 0, 3, 2, 1], "poses": poses, "fps": 60}
    return {f"rgb/{i}.png": _image(i) for i in range(VIEWS)} | {"metadata.json": json.dumps(meta).encode()}


SCENES: dict[str, tuple[str, Callable[[], Files]]] = {
    "blender": ("blender", cache(_blender)),
    "nerfstudio": ("nerfstudio or instant-ngp", cache(_nerfstudio)),
    "llff": ("LLFF", cache(_llff)),
    "llff_forward": ("LLFF", cache(lambda: _llff(_pose_that_faces_one_way))),
    "nsvf": ("NSVF", cache(_nsvf)),
    "neus": ("IDR or NeuS", cache(_neus)),
    "colmap_text": ("COLMAP", cache(_colmap_text)),
    "colmap_binary": ("COLMAP", cache(_colmap_binary)),
    "metashape": ("Metashape", cache(_metashape)),
    "realitycapture": ("RealityCapture or RealityScan", cache(_realitycapture)),
    "polycam": ("Polycam", cache(_polycam)),
    "record3d": ("Record3D", cache(_record3d)),
}
"""By name: the format, as the registry has it, and the files of a sound scene."""


def write_files(folder: Path, files: Files) -> None:
    """Writes files into a folder, which is made if need be."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def assert_sound(scene: Scene) -> None:
    """Fails unless a scene is one that can be trained on: finite, in range, and of one size."""
    box = scene.aabb
    assert bool(box.isfinite().all())
    assert bool((box[0] < box[1]).all())
    warp = choose_warp(scene, WarpConfig())
    if warp is not None:
        assert bool(torch.tensor([warp.outermost, warp.warped_aabb]).isfinite().all())
    assert scene.splits
    for split in scene.splits.values():
        count = len(split)
        assert count > 0
        assert split.images.shape == (count, split.cameras.height, split.cameras.width, 4)
        assert split.images.dtype == torch.uint8
        assert len(set(split.names)) == count
        c2w, intrinsics = split.cameras.c2w, split.cameras.intrinsics
        assert bool(c2w.isfinite().all()), "a pose is not finite"
        assert bool(intrinsics.isfinite().all()), "intrinsics are not finite"
        assert bool((intrinsics[:, :2] > 0).all()), "a focal length is not positive"
        error = (c2w[:, :3, :3] @ c2w[:, :3, :3].mT - torch.eye(3)).abs().max()
        assert float(error) < 2e-3, "a pose is no rotation"
        assert bool((torch.linalg.det(c2w[:, :3, :3]) > 0).all()), "a pose is a mirror image"
        rays = split.cameras.image_rays(0, box)
        assert bool(rays.directions.isfinite().all()), "a ray is not finite"


OPTIONS = ("aabb", "splits", "downscale", "image_size")
"""What a refusal to load a scene may name in place of a file."""
