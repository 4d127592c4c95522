"""Files that are not code: configurations and the bundled scene, in a clone or in an installed copy."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def config_folder() -> Path:
    """Returns the folder of the configuration files.

    Raises:
        FileNotFoundError: There is none, neither in the package nor beside it.
    """
    folders = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
    for folder in folders:
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"configurations are neither in {folders[0]} nor in {folders[1]}; reinstall voxelfield")


def bundled_scene(name: str) -> Path:
    """Returns where a scene would be that came with voxelfield; it need not exist."""
    packaged = _PACKAGE / "scenes" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / "data" / name
