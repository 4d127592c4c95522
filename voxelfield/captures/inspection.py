"""Looking at a scene before training: what it holds, what is likely wrong, a picture and a page."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from voxelfield.captures.capture import read_capture
from voxelfield.captures.checks import Finding, check_capture
from voxelfield.captures.drawing import draw
from voxelfield.captures.figures import figures
from voxelfield.captures.page import make_page
from voxelfield.files import atomic_write
from voxelfield.messages import one_line, printable

_LOADERS = "voxelfield.datasets"

PICTURE = "inspect.png"
"""Name of the picture."""

PAGE = "inspect.html"
"""Name of the page."""


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection.

    Attributes:
        name: The scene's name.
        rows: Figures, as labels and texts.
        findings: What is likely wrong.
        notes: The warnings of the loader, which the log has already, and which page and picture have as well.
    """

    name: str
    rows: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def inspect_scene(
    folder: Path, out: Path, aabb: Sequence[Sequence[float]] | None = None, model: int | None = None
) -> Inspection:
    """Reads a scene, checks it, and writes its picture and page.

    Args:
        folder: Folder of the scene, in any format that :func:`voxelfield.datasets.loading.load_scene` reads.
        out: Folder for :data:`PICTURE` and :data:`PAGE`; created if missing.
        aabb: (2, 3) box in world units; None for that of the format.
        model: Number of the COLMAP model where a folder has several; None: the one with the most images.

    Returns:
        What was found.

    Raises:
        FileNotFoundError: The folder is of no known format, or lacks files.
        MissingPackageError: A package that the format needs is not installed.
        ValueError: A file is not as it must be.
    """
    with _warnings_of(_LOADERS) as notes:
        capture = read_capture(folder, aabb, model)
    rows, findings = figures(capture), check_capture(capture)
    shown = [*(Finding("loading", note) for note in notes), *findings]
    picture = draw(capture, shown)
    with atomic_write(out / PICTURE) as file:
        file.write(picture)
    with atomic_write(out / PAGE) as file:
        file.write(make_page(capture.name, rows, shown, picture).encode())
    return Inspection(capture.name, tuple(rows), tuple(findings), tuple(notes))


@contextlib.contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Yields a list to which the warnings that a logger and those below it give meanwhile are added."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(one_line(printable(record.getMessage())))

    logger, collector = logging.getLogger(name), Collector(logging.WARNING)
    logger.addHandler(collector)
    try:
        yield found
    finally:
        logger.removeHandler(collector)
