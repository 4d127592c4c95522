"""Which scenes have a public download."""

from __future__ import annotations

from pathlib import Path

_MANIFESTS = Path(__file__).parent / "manifests"


def manifest_path(name: str) -> Path:
    """Returns where the download manifest of a scene is, if it has one."""
    return _MANIFESTS / f"{name}.json"


def downloadable_scenes() -> tuple[str, ...]:
    """Lists the scenes that ``voxelfield download`` can fetch."""
    return tuple(sorted(path.stem for path in _MANIFESTS.glob("*.json")))
