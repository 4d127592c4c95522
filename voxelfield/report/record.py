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

from voxelfield.files import open_regular, read_regular
from voxelfield.messages import in_shell
from voxelfield.report.thumbnails import ViewPictures
from voxelfield.run_directory import EVENTS, METRICS
from voxelfield.settings import RunConfig

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Steps, rising, with a value each."""

_LOGGED = re.compile(r"^\[[^]]*\]\[[^]]*\]\[(?:WARNING|ERROR|CRITICAL)\] - (.*)$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A finished run, as its report shows it: its ``metrics.json``, its settings and what else its directory has.

    Pictures are by the names of views, of which some may have none, and curves by tags such as ``train/psnr``. Commands
    are purposes with the shell commands that serve them, ``logged`` are the warnings in the run's log, and ``finished``
    says when it finished, if that is known.
    """

    metrics: Mapping[str, Any]
    config: RunConfig
    pictures: Mapping[str, ViewPictures] = field(default_factory=dict)
    history: Mapping[str, Curve] = field(default_factory=dict)
    commands: tuple[tuple[str, str], ...] = ()
    logged: tuple[str, ...] = ()
    finished: str = ""

    @classmethod
    def read(
        cls, directory: Path, metrics: Mapping[str, Any], config: RunConfig, pictures: Mapping[str, ViewPictures]
    ) -> RunRecord:
        """Returns the record of the run in a directory, whose log, TensorBoard files and overrides are read.

        Raises ValueError if one of these is damaged; the message names it.
        """
        path = directory / METRICS
        written = datetime.fromtimestamp(path.stat().st_mtime).astimezone() if path.is_file() else None
        finished = "" if written is None else written.strftime("%Y-%m-%d at %H:%M (UTC%z)")
        logs = (read_regular(log).decode(errors="replace") for log in sorted(directory.glob("*.log")))
        logged = tuple(dict.fromkeys(message for text in logs for message in _LOGGED.findall(text)))
        return cls(metrics, config, pictures, read_history(directory), tuple(_commands(directory)), logged, finished)

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
    files = list(directory.glob(EVENTS))
    if not files:
        return {}
    for file in files:
        open_regular(file).close()  # TensorBoard would wait for a named pipe
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 loads all items of a kind, 1 only one.
    limits = {"scalars": 0, "tensors": 1, "images": 1, "histograms": 1, "compressedHistograms": 1, "audio": 1}
    # Below errors, it warns about steps that an interrupted run logged twice and reports the end of the last file.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(directory), size_guidance=limits).Reload()
    return {
        tag: tuple((event.step, float(event.value)) for event in events.Scalars(tag))
        for tag in events.Tags()["scalars"]
    }


def _commands(directory: Path) -> Iterator[tuple[str, str]]:
    run = in_shell(directory)
    overrides = directory / ".hydra" / "overrides.yaml"
    if overrides.is_file():
        yield "Repeat the training", shlex.join(["voxelfield", "train", *read_overrides(overrides)])
    yield "Repeat the evaluation", f"voxelfield eval {run}"
    yield "Render a video", f"voxelfield render {run} --out video.mp4"
    yield "Show the records", f"tensorboard --logdir {run}"
    yield "Rewrite this report", f"voxelfield report {run}"


def read_overrides(path: Path) -> list[str]:
    """Reads Hydra's record of a command line, without the output directory and the checkpoint that a run resumed from.

    The record may come from a stranger: interpolations such as ``${oc.env:HOME}`` stay text.
    """
    try:
        items = yaml.load(read_regular(path), yaml.BaseLoader) or []  # all values are texts
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} must be a list in YAML, got a file that is not valid") from error
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{path} must be a list of texts in YAML, got another structure")
    # An override that completed the command line with ++ is given without these signs.
    overrides = [item.removeprefix("++") for item in items]
    return [text for text in overrides if text.lstrip("+").partition("=")[0] not in ("resume", "hydra.run.dir")]
