"""Fuzzes a file parser with atheris, which looks for input that reaches new lines of Python.

    python tests/fuzz/fuzz_files.py TARGET [SECONDS] [-- LIBFUZZER_OPTION ...]

A target is one of those in ``TARGETS``. It begins with sound files, made by code, and ends after so many seconds (300)
or at the first finding, whose input is written to build/fuzz/TARGET. Needs Linux and `pip install -e ".[fuzz]"`.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["voxelfield.datasets", "voxelfield.export", "voxelfield.training", "PIL"]):
    import fuzz_pictures
    import fuzz_scenes
    import fuzz_trained

    from voxelfield.datasets.camera_path import read_camera_path
    from voxelfield.datasets.images import read_images
    from voxelfield.datasets.loading import load_scene
    from voxelfield.trained.loading import load

_OUT = Path("build", "fuzz")


def _refused(load_it: Callable[[], object], place: Path) -> None:
    """Calls a loader; anything but a result or a refusal in one line that names the place is a finding."""
    try:
        load_it()
    except (ValueError, OSError) as error:
        text = str(error)
        if "\n" in text or not (str(place) in text or any(name in text for name in fuzz_scenes.OPTIONS)):
            raise AssertionError(f"no refusal in one line that names a file or an option: {text!r}") from error


class _Target:
    """Several inputs of one kind: the first byte of what atheris makes says which is replaced by the rest.

    Args:
        faces: For each, the bytes to begin with, and what is called with others.
    """

    def __init__(self, faces: Sequence[tuple[bytes, Callable[[bytes], None]]]) -> None:
        self._calls = [call for _, call in faces]
        self.corpus = [bytes([number]) + content for number, (content, _) in enumerate(faces)]

    def __call__(self, data: bytes) -> None:
        if data:
            self._calls[data[0] % len(self._calls)](data[1:])


def _files_of(scene: str, *paths: str) -> list[tuple[bytes, Callable[[bytes], None]]]:
    """Files of a scene, the others of which stay as they are."""
    files = dict(fuzz_scenes.SCENES[scene][1]())
    folder = Path(tempfile.mkdtemp(prefix="voxelfield-fuzz-"))

    def load_with(path: str, data: bytes) -> None:
        fuzz_scenes.write_files(folder, files | {path: data})
        _refused(lambda: fuzz_scenes.assert_sound(load_scene(folder, splits=None)), folder)

    return [(files[path], partial(load_with, path)) for path in paths]


def _trained(
    name: str, content: bytes, repair: Callable[[bytes], bytes] | None = None
) -> tuple[bytes, Callable[[bytes], None]]:
    """A file that a run leaves: as it is on disk, or with checksums that are made right."""
    path = Path(tempfile.mkdtemp(prefix="voxelfield-fuzz-"), name)

    def load_with(data: bytes) -> None:
        if repair is not None:
            try:
                data = repair(data)
            except (ValueError, RecursionError):
                return  # nothing that a writer could have written
        path.write_bytes(data)
        _refused(lambda: load(path, "cpu"), path)

    return content, load_with


def _model() -> _Target:
    name = "model.safetensors"
    described = _trained(name, fuzz_trained.description_bytes(), fuzz_trained.model_of_description)
    return _Target([_trained(name, fuzz_trained.model_bytes()), described])


def _camera_path() -> _Target:
    path = Path(tempfile.mkdtemp(prefix="voxelfield-fuzz-"), "path.json")
    content = json.dumps(fuzz_trained.path_content()).encode()

    def render(data: bytes) -> None:
        path.write_bytes(data)
        _refused(lambda: read_camera_path(path), path)

    return _Target([(content, render)])


def _checkpoint() -> _Target:
    content = fuzz_trained.checkpoint_bytes(fuzz_trained.checkpoint_state())
    return _Target([_trained("last.pt", content), _trained("last.pt", content, fuzz_trained.with_right_checksums)])


def _colmap(form: str, *names: str) -> _Target:
    return _Target(_files_of(f"colmap_{form}", *(f"sparse/0/{name}" for name in names)))


def _picture() -> _Target:
    """Pictures of the formats that are read; the checksums of PNG files are made right."""
    path = Path(tempfile.mkdtemp(prefix="voxelfield-fuzz-"), "r_0.png")

    def read(data: bytes) -> None:
        path.write_bytes(fuzz_pictures.with_right_crcs(data))
        with fuzz_pictures.only_listed_formats():
            _refused(lambda: read_images([path]), path)

    sound = fuzz_pictures.sound_pictures()
    return _Target([(content, read) for name, content in sound.items() if name.split()[0] in fuzz_pictures.READ])


TARGETS: dict[str, Callable[[], _Target]] = {
    "transforms": lambda: _Target(
        _files_of("nerfstudio", "transforms.json") + _files_of("blender", "transforms_train.json")
    ),
    "llff": lambda: _Target(_files_of("llff", "poses_bounds.npy")),
    "nsvf": lambda: _Target(_files_of("nsvf", "pose/0_v1.txt", "intrinsics.txt", "bbox.txt")),
    "colmap_binary": lambda: _colmap("binary", "cameras.bin", "images.bin", "points3D.bin", "rigs.bin", "frames.bin"),
    "colmap_text": lambda: _colmap("text", "cameras.txt", "images.txt", "points3D.txt"),
    "model": _model,
    "checkpoint": _checkpoint,
    "camera_path": _camera_path,
    "picture": _picture,
}


def main(arguments: list[str]) -> None:
    """Fuzzes one target."""
    options = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    wanted = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if not wanted or wanted[0] not in TARGETS:
        sys.exit(f"TARGET must be one of {', '.join(TARGETS)}, got {' '.join(wanted[:1]) or 'none'}")
    logging.disable(logging.WARNING)
    target = TARGETS[wanted[0]]()
    folder = _OUT / wanted[0]
    shutil.rmtree(folder / "corpus", ignore_errors=True)
    (folder / "corpus").mkdir(parents=True)
    for number, content in enumerate(target.corpus):
        (folder / "corpus" / f"sound_{number}").write_bytes(content)
    seconds = wanted[1] if len(wanted) > 1 else "300"
    # An input of more than ten seconds is a hang; memory is in MiB.
    limits = [
        "-timeout=10",
        "-rss_limit_mb=3000",
        "-max_len=32768",
        f"-max_total_time={seconds}",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", *options, str(folder / "corpus")], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
