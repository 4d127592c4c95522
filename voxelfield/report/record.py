"""The content of a run's report, read from its directory."""

from __future__ import annotations

import logging
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from voxelfield.components.tensorboard import SHOWN_AS
from voxelfield.files import open_regular, read_regular
from voxelfield.messages import in_shell
from voxelfield.report.thumbnails import ViewPictures
from voxelfield.run_directory import EVENTS, METRICS, VIDEO
from voxelfield.settings import RunConfig

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Steps, rising, with a value each."""

_LOGGED = re.compile(r"^\[[^]]*\]\[[^]]*\]\[(?:WARNING|ERROR|CRITICAL)\] - (.*)$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A finished run, as its report shows it: its ``metrics.json``, its settings and what else its directory has.

    Pictures are by the names of views, of which some may have none, and curves by tags such as ``train/psnr``. Commands
    are purposes with the shell commands that serve them, ``logged`` are the warnings in the run's log, ``finished``
    says when it finished, if that is known, ``previewed`` are the views whose PSNR has a curve, and ``video`` is the
    run's video, a file in MP4, or empty.
    """

    metrics: Mapping[str, Any]
    config: RunConfig
    pictures: Mapping[str, ViewPictures] = field(default_factory=dict)
    history: Mapping[str, Curve] = field(default_factory=dict)
    commands: tuple[tuple[str, str], ...] = ()
    logged: tuple[str, ...] = ()
    finished: str = ""
    previewed: tuple[str, ...] = ()
    video: bytes = b""

    @classmethod
    def read(
        cls, directory: Path, metrics: Mapping[str, Any], config: RunConfig, pictures: Mapping[str, ViewPictures]
    ) -> RunRecord:
        """Returns the record of the run in a directory, whose log, TensorBoard files, overrides and video are read.

        Raises ValueError if one of these is damaged; the message names it.
        """
        path = directory / METRICS
        written = datetime.fromtimestamp(path.stat().st_mtime).astimezone() if path.is_file() else None
        finished = "" if written is None else written.strftime("%Y-%m-%d at %H:%M (UTC%z)")
        logs = (read_regular(log).decode(errors="replace") for log in sorted(directory.glob("*.log")))
        logged = tuple(dict.fromkeys(message for text in logs for message in _LOGGED.findall(text)))
        history, previewed = _read_events(directory)
        video = read_regular(directory / VIDEO) if (directory / VIDEO).exists() else b""
        return cls(metrics, config, pictures, history, tuple(_commands(directory)), logged, finished, previewed, video)

    def curve(self, tag: str) -> Curve:
        """Returns the curve of a tag; empty if nothing was recorded under it."""
        return self.history.get(tag, ())

    def last(self, tag: str) -> float:
        """Returns the last value that was recorded under a tag; NaN if nothing was."""
        curve = self.curve(tag)
        return curve[-1][1] if curve else math.nan


def read_history(directory: Path) -> dict[str, Curve]:
    """Reads the scalars that TensorBoard shows of a run, by tag; none if nothing was recorded (``logger=none``).

    Records of an interrupted run after the step from which it was resumed are left out. Raises ValueError if one of
    TensorBoard's files is not a file, but a named pipe, for example.
    """
    return _read_events(directory)[0]


def _read_events(directory: Path) -> tuple[dict[str, Curve], tuple[str, ...]]:
    """Returns the curves of :func:`read_history` and the names of the test views with previews."""
    files = list(directory.glob(EVENTS))
    if not files:
        return {}, ()
    for file in files:
        open_regular(file).close()  # TensorBoard would wait for a named pipe
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 loads all items of a kind, 1 only one.
    limits = {"scalars": 0, "tensors": 1, "images": 1, "histograms": 1, "compressedHistograms": 1, "audio": 1}
    # Below errors, it warns about steps that an interrupted run logged twice and reports the end of the last file.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(directory), size_guidance=limits).Reload()
    tags = {shown: tag for tag, shown in SHOWN_AS.items()}
    curves = {
        tags.get(tag, tag): tuple((event.step, float(event.value)) for event in events.Scalars(tag))
        for tag in events.Tags()["scalars"]
    }
    return curves, tuple(tag.removeprefix("test/") for tag in events.Tags()["images"] if tag.startswith("test/"))


def _commands(directory: Path) -> Iterator[tuple[str, str]]:
    run = in_shell(directory)
    yield "Look at the field in a browser", f"voxelfield view {run}"
    yield "Render another video", f"voxelfield render {run} --out video.mp4"
    yield "Export a mesh, and other formats (--help)", f"voxelfield export {run} --mesh mesh.glb"
    overrides = read_overrides(directory)
    if overrides is not None:
        yield "Repeat the training", shlex.join(["voxelfield", "train", *overrides])
    yield "Repeat the evaluation", f"voxelfield eval {run}"
    yield "Show the records", f"tensorboard --logdir {run}"
    yield "Rewrite this report", f"voxelfield report {run}"


def read_overrides(directory: Path) -> list[str] | None:
    """Reads Hydra's record of a command line, without the output directory and the checkpoint that a run resumed from.

    The record may come from a stranger: interpolations such as ``${oc.env:HOME}`` stay text. None if there is none;
    raises ValueError if it is damaged.
    """
    path = directory / ".hydra" / "overrides.yaml"
    if not path.is_file():
        return None
    try:
        items = yaml.load(read_regular(path), yaml.BaseLoader) or []  # all values are texts
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} must be a list in YAML, got a file that is not valid") from error
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{path} must be a list of texts in YAML, got another structure")
    # An override that completed the command line with ++ is given without these signs.
    overrides = [item.removeprefix("++") for item in items]
    return [text for text in overrides if text.lstrip("+").partition("=")[0] not in ("resume", "hydra.run.dir")]
