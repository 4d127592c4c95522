"""Packages outside of the tree, as pip would install them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str] | None = None
) -> None:
    """Writes the modules of a package and the metadata that pip would write.

    Args:
        folder: Folder for the import path.
        name: Name of the package.
        entry_points: For each group, what its names stand for.
        modules: Source code of modules by name.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in announced.items())
        for group, announced in entry_points.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(source)
