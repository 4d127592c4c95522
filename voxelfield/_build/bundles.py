"""Which CUDA sources share a translation unit.

Every translation unit costs about two seconds of processor time for each GPU architecture, and four for host code, to
read the headers of torch and CUDA. A small source takes little more than that, so the small sources of a folder are
compiled together.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Sources that take long by themselves, the longest first: one that began last would leave the other cores idle.
LONG = (
    "mlp/backward.cu",
    "stencil/gather.cu",
    "stencil/splat_tiled.cu",
    "fields/sh_render.cu",
    "stencil/splat.cu",
    "fields/pyramid_render.cu",
)


def bundles(root: Path) -> dict[str, list[str]]:
    """Groups the CUDA sources.

    Args:
        root: The extension's folder.

    Returns:
        For each translation unit its name, and its sources relative to ``root``; in the order to compile them in.
    """
    sources = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cu"))
    units = {source.removesuffix(".cu").replace("/", "_"): [source] for source in LONG if source in sources}
    for source in sources:
        if source not in LONG:
            units.setdefault(source.partition("/")[0], []).append(source)
    return units


def write_bundles(root: Path, folder: Path) -> list[Path]:
    """Writes the translation units; unchanged files are not rewritten, because ninja compares modification times.

    Args:
        root: The extension's folder, which the compiler must search for headers.
        folder: Where to write them; made if absent.

    Returns:
        Their paths, in the order to compile them in. They sort in this order too, because setuptools sorts sources.
    """
    return [
        write_if_changed(folder / f"{place:02}_{name}.cu", _including(sources))
        for place, (name, sources) in enumerate(bundles(root).items())
    ]


def write_if_changed(path: Path, content: str) -> Path:
    """Writes a generated source unless it is there already, so that ninja does not compile it again."""
    if not path.is_file() or path.read_text() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return path


def _including(sources: Iterable[str]) -> str:
    return "".join(f'#include "{source}"\n' for source in sources)
