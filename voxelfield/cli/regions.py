"""The processes that train the regions of a run, one for each region, as many at a time as there are devices."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from voxelfield.cli.running import hydra_quoted
from voxelfield.devices import choose_device, several_devices
from voxelfield.regions.division import REGIONS, Division
from voxelfield.training.config import RunConfig
from voxelfield.training.config.run import REGION_OVERLAP
from voxelfield.training.interrupt import Interrupt

logger = logging.getLogger("train")

_POLL_SECONDS = 0.1


def devices_of(settings: RunConfig) -> list[str]:
    """Returns the devices on which regions are trained at the same time, one each; the CPU stands for one process.

    Raises:
        ValueError: There are fewer devices.
    """
    given = settings.devices
    count: int | Literal["all"] = int(given) if given.isdecimal() else 1 if ":" in settings.device else "all"
    return [str(device) for device in several_devices(choose_device(settings.device), count)][: settings.regions]


def train_regions(directory: Path, devices: Sequence[str], division: Division) -> bool:
    """Trains the regions of a run, each by this program's command line with settings of its own.

    A region that fails leaves the others to go on. A signal stops those in training, which save checkpoints. With
    several devices, the output of each region is in a file ``regions/0.log``.

    Args:
        directory: The directory of the run.
        devices: The devices that train one region at a time (:func:`devices_of`).
        division: The regions.

    Returns:
        Whether all regions are trained; False after a signal.

    Raises:
        ChildProcessError: Regions have failed; the message names them.
    """
    folder, count = directory / REGIONS, len(division.boxes)
    folder.mkdir(exist_ok=True)

    def command(number: int, device: str) -> list[str]:
        return command_line(folder / str(number), division.boxes[number], device)

    with Interrupt() as interrupt:
        failed = run_queue(count, command, devices, folder if len(devices) > 1 else None, interrupt)
        how = f"continue with resume=auto hydra.run.dir={directory}"
        if interrupt.requested:
            logger.warning("stopped; %s", how)
            return False
    if failed:
        names = ", ".join(map(str, failed))
        raise ChildProcessError(
            f"{len(failed)} of {count} regions failed: {names}; the logs in {folder} say why; {how}"
        )
    return True


def run_queue(
    count: int,
    command: Callable[[int, str], Sequence[str]],
    devices: Sequence[str],
    logs: Path | None,
    interrupt: Interrupt,
) -> list[int]:
    """Runs commands, one at a time on each device, and returns the numbers of those that have failed.

    Args:
        count: Number of commands.
        command: Returns the command line of a number from 0 on a device.
        devices: Names of the devices; one may be named several times.
        logs: Folder for the output of each command, ``0.log`` and so on; None: it is that of this process.
        interrupt: Once it is requested, no command begins, and those that run are told to end.
    """
    waiting, free, failed = list(range(count)), list(devices), []
    running: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // len(devices))))
    try:
        while running or (waiting and not interrupt.requested):
            while waiting and free and not interrupt.requested:
                number, device = waiting.pop(0), free.pop(0)
                logger.info("region %d of %d begins on %s", number, count, device)
                with contextlib.nullcontext() if logs is None else (logs / f"{number}.log").open("wb") as out:
                    line, environment = command(number, device), {**os.environ, "OMP_NUM_THREADS": threads}
                    running[number] = subprocess.Popen(line, env=environment, stdout=out, stderr=out), device
            for number, (process, device) in list(running.items()):
                if process.poll() is None:
                    if interrupt.requested:
                        process.terminate()
                    continue
                del running[number]
                free.append(device)
                if process.returncode != 0:
                    failed.append(number)
                    if not interrupt.requested:
                        logger.error("region %d has failed with exit status %d", number, process.returncode)
            time.sleep(_POLL_SECONDS)
    finally:
        for process, _ in running.values():
            process.kill()
    return sorted(failed)


def command_line(directory: Path, box: Sequence[Sequence[float]], device: str) -> list[str]:
    """Returns this program's command line, changed to train one region.

    Args:
        directory: Run directory of the region.
        box: The box around its cameras, world units.
        device: Name of the device.
    """
    given = sys.orig_argv[1:]
    # After the last override, because Hydra's parser accepts options in front of overrides or behind them only.
    end = max((index for index, text in enumerate(given, 1) if re.match(r"[^-].*=", text)), default=len(given))
    own = [
        f"scene.region={[list(corner) for corner in box]}",
        "regions=1",
        f"region_overlap={REGION_OVERLAP}",
        f"device={device}",
        "devices=1",
        f"hydra.run.dir={hydra_quoted(str(directory.resolve()))}",
    ]
    return [sys.executable, *given[:end], *own, *given[end:]]
