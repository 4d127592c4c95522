"""Where and how a run was made: software, machine, commands, and what its log warns of."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import torch

import voxelfield
from voxelfield.config.plain_yaml import read_texts
from voxelfield.files import read_regular
from voxelfield.training.state.run_directory import METRICS

_LOGGED = re.compile(r"^\[[^]]*\]\[[^]]*\]\[(WARNING|ERROR|CRITICAL)\] - (.*)$")


def environment() -> dict[str, str]:
    """Returns versions of software and the kind of system, for ``metrics.json``."""
    return {
        "voxelfield": voxelfield.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU threads": str(torch.get_num_threads()),
    }


def peak_host_gib() -> float | None:
    """Returns the most memory that this process has held on the host; None where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def commands(directory: Path) -> tuple[tuple[str, str], ...]:
    """Returns purposes with the shell commands that serve them.

    Args:
        directory: Run directory. How the run was started is taken from Hydra's record in it, and left out without one.
    """
    run = shlex.quote(_shown(directory))
    again = _training_command(directory)
    return (
        *([("Repeat the training", again)] if again is not None else []),
        ("Repeat the evaluation", f"voxelfield eval {run}"),
        ("Render a video", f"voxelfield render {run} --out video.mp4"),
        ("Show the records", f"tensorboard --logdir {run}"),
        ("Rewrite this report", f"voxelfield report {run}"),
    )


def given_overrides(directory: Path) -> list[str] | None:
    """Returns what a run was told on its command line, or None where Hydra has kept no record of it.

    Args:
        directory: Run directory.

    Raises:
        ValueError: The record is damaged; the message names the file.
    """
    record = directory / ".hydra" / "overrides.yaml"
    if not record.is_file():
        return None
    return read_texts(record)


def chosen_settings(overrides: Iterable[str]) -> set[str]:
    """Returns names of the settings that were chosen on a command line, as those of a sweep are.

    Args:
        overrides: As on Hydra's command line; one that chooses a file, such as ``model=dense``, stands for the kind or
            the name of what is in it too.
    """
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    return {name for key in keys for name in (key, f"{key}.kind", f"{key}.name")}


def logged_warnings(directory: Path) -> tuple[str, ...]:
    """Returns the warnings and errors in a run's log, each once.

    Args:
        directory: Run directory, with the log files that Hydra writes; there may be none.
    """
    lines: Iterable[str] = (
        line
        for path in sorted(directory.glob("*.log"))
        for line in read_regular(path).decode(errors="replace").splitlines()
    )
    return tuple(dict.fromkeys(found[2] for line in lines if (found := _LOGGED.match(line))))


def finishing_time(directory: Path) -> str:
    """Returns when a run's metrics were written, in words and local time; nothing if they were not.

    Args:
        directory: Run directory.
    """
    path = directory / METRICS
    if not path.is_file():
        return ""
    return datetime.fromtimestamp(path.stat().st_mtime).astimezone().strftime("%Y-%m-%d at %H:%M (UTC%z)")


def _training_command(directory: Path) -> str | None:
    overrides = given_overrides(directory)
    if overrides is None:
        return None
    # The output directory and the checkpoint that a run resumed from are not part of its settings.
    kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in ("resume", "hydra.run.dir")]
    # The command line is completed with these signs, and will be again.
    kept = [text.removeprefix("++") for text in kept]
    return shlex.join(["voxelfield", "train", *kept])


def _shown(directory: Path) -> str:
    """Returns a path from the working folder if it lies within, and as it is otherwise."""
    whole = directory.resolve()
    return str(whole.relative_to(Path.cwd())) if whole.is_relative_to(Path.cwd()) else str(directory)
