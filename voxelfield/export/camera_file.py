"""A scene's cameras as a ``transforms.json``, as nerfstudio and instant-ngp read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from voxelfield.datasets.images import image_size
from voxelfield.datasets.lenses import share_camera_model, transforms_camera
from voxelfield.datasets.scene import Scene, Split
from voxelfield.export.registry import ExportFormat, ExportSource
from voxelfield.files import check_suffix, write_json


def save_cameras(path: Path | str, scene: Scene, folder: Path) -> None:
    """Writes the cameras of all loaded splits of a scene, for its image files at their original size.

    Frames name masks, depths and times too. Poses are camera to world, in the units and axes of the world, with OpenGL
    axes of the camera (x right, y up, looking along -z). Intrinsics and sizes are for the image files, whatever size
    was loaded. ``train_filenames`` and so on list the splits.

    Args:
        path: ``*.json``.
        scene: The scene; images must have been read from files.
        folder: The scene's folder, to which paths of images are relative; stored there, the file makes it a scene.

    Raises:
        ValueError: The path has another suffix, or an image was not read from a file in the folder.
        OSError: An image or the file cannot be read or written.
    """
    check_suffix("path", path, (".json",))
    frames = {name: [*_frames(split, folder, scene.origin)] for name, split in scene.splits.items()}
    content = share_camera_model([frame for each in frames.values() for frame in each])
    content |= {f"{name}_filenames": [frame["file_path"] for frame in each] for name, each in frames.items()}
    write_json(path, content)


def _frames(split: Split, folder: Path, origin: Sequence[float]) -> Iterator[dict[str, Any]]:
    if split.paths is None:
        raise ValueError("scene must be one whose images are files, got a split without paths")
    for index, path in enumerate(split.paths):
        frame = {"file_path": path, **{key: values[index] for key, values in split.files.items()}}
        for key, value in frame.items():
            if isinstance(value, Path):
                if not value.is_relative_to(folder):
                    raise ValueError(f"folder must contain the images of the scene, got {folder}, which has no {value}")
                frame[key] = value.relative_to(folder).as_posix()
        frame = {key: value for key, value in frame.items() if value is not None}
        yield frame | transforms_camera(split.cameras, index, image_size(path), origin)


def _write(path: Path, source: ExportSource) -> str:
    scene = source.scene(downscale=1)
    save_cameras(path, scene, source.folder)
    return f"{sum(map(len, scene.splits.values()))} cameras"


CAMERAS = ExportFormat(
    name="cameras", help="poses and intrinsics for the scene's image files: json", write=_write, suffixes=(".json",)
)
