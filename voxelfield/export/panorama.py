"""What lies beyond a field, as a panorama."""

from __future__ import annotations

from pathlib import Path

from voxelfield.export.registry import ExportFormat, ExportSource
from voxelfield.media.png import BackgroundWriter


def _check(source: ExportSource) -> None:
    if source.model.environment is None:
        raise ValueError("--environment must be left out for this run, which was trained with model.environment=none")


def _write(path: Path, source: ExportSource) -> str:
    assert source.model.environment is not None
    with BackgroundWriter(workers=1) as writer:
        writer.save(path, source.model.environment.panorama())
    return "a panorama"


ENVIRONMENT = ExportFormat(
    name="environment",
    help="a panorama of what lies beyond the field, of a run with model.environment=map: png",
    write=_write,
    suffixes=(".png",),
    check_source=_check,
)
