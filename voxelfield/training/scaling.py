"""The time of a training step on several devices, estimated before training, and how many devices pay."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from multiprocessing import get_context

import torch

from voxelfield.fields.environment import environment_of
from voxelfield.peer_memory import MOST_PROCESSES
from voxelfield.training.config import RunConfig
from voxelfield.training.fields import untrained_model

logger = logging.getLogger(__name__)

# Of an H200; docs/scaling.md compares the presets' steps that these give with measured ones.
_LAUNCH_SECONDS = 0.4e-3
# Share of the rays' time that does not shrink with their number, because a few rays are long.
_LONGEST_RAYS = 0.15
_SECONDS_PER_FLOP = 1 / 150e12  # of the networks
_SECONDS_PER_FEATURE = 0.06e-9  # of a sample: marching, reading the grids, adding to their gradients
_SECONDS_PER_BYTE = 1 / 3.4e12  # of the device's own memory
# Adam reads and writes a master, two moments and a gradient in float32, and writes a copy in 16 bits. Of sparse levels,
# it does so where a step has changed something, and vertices that several blocks have are read once more.
_UPDATE_BYTES, _SPARSE_UPDATE_BYTES = 34, 20
# Of a dense level, about this share of the tiles is next to occupied cells.
_ACTIVE_SHARE = 0.1

# Of the features that belong to tiles and blocks which are updated, a step changes about this share.
_CHANGED_SHARE = 0.3

_POSITION_BYTES, _HALF, _SINGLE = 12, 2, 4
# The number of rays; positions, gradients of features and of the networks; the lists of changed vertices, their copies.
# GPUs that write into each other's memory exchange only the first and the fourth, and wait for each other twice more.
_EXCHANGES, _DIRECT_EXCHANGES = 6, 4

# For starting the processes and their group.
_START_SECONDS = 8.0
# Twice as many devices must take at most this share of the time.
_WORTH_DOUBLING = 0.8

_PROBED_BYTES = 1 << 28


@dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        bandwidth: Bytes per second that each device receives in large exchanges.
        latency: Seconds that an exchange between two devices takes, however small it is, including the wait for
            the slower one.
        direct: Whether devices write into each other's memory (:mod:`voxelfield.peer_memory`).
    """

    bandwidth: float
    latency: float = 30e-6
    direct: bool = False


NVLINK = Link(300e9, direct=True)
"""NVLink of an H100 or H200."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a training step, by part.

    Attributes:
        rays: What is proportional to the samples: marching, networks, gradients of the grids.
        update: Adam over the grids, with the rounding to 16-bit copies.
        undivided: What each device does whatever its share: launches, and waiting for its longest rays.
        samples: Receiving the positions of the other devices' samples and the gradients in their features, and looking
            through all of them, for each level, for those in the device's own part.
        copies: Listing the changed vertices of the own part, and exchanging their 16-bit copies; over a direct link,
            the time by which the exchange takes longer than the update, which does it.
        latency: What exchanges take besides their bytes.
    """

    rays: float
    update: float
    undivided: float
    samples: float = 0.0
    copies: float = 0.0
    latency: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step, whose parts follow one another."""
        return math.fsum(astuple(self))


@dataclass(frozen=True)
class StepWork:
    """A training step on one device, and what several devices would exchange in it.

    Attributes:
        samples: Number of visible samples.
        channels: Number of features of a sample.
        levels: Number of grids that a sample reads.
        features: Number of elements of the grids in tiles and blocks that a step may update.
        rays: Seconds proportional to the samples, see :class:`StepSeconds`.
        update: Seconds of Adam over the grids.
        undivided: Seconds that depend on neither, see :class:`StepSeconds`.
    """

    samples: int
    channels: int
    levels: int
    features: int
    rays: float
    update: float
    undivided: float

    @property
    def sample_bytes(self) -> int:
        """Bytes of all samples that devices exchange: positions, and gradients of features in 16 bits."""
        return self.samples * (_POSITION_BYTES + _HALF * self.channels)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies that devices exchange."""
        return round(_HALF * _CHANGED_SHARE * self.features)

    def on(self, devices: int, link: Link) -> StepSeconds:
        """Estimates the step on several devices, each with an equal share of the samples and of the grids."""
        if devices == 1:
            return StepSeconds(self.rays, self.update, self.undivided)
        received = (devices - 1) / devices / link.bandwidth
        looked_through = self.samples * self.levels * _POSITION_BYTES * _SECONDS_PER_BYTE
        update, copies, exchanges = self.update / devices, self.copy_bytes * received, _EXCHANGES
        if link.direct and devices <= MOST_PROCESSES:
            copies, exchanges = max(0.0, copies - update), _DIRECT_EXCHANGES
        else:
            # Gradients are read once more, and copies are packed and unpacked.
            copies += (_SINGLE * self.features / devices + 4 * self.copy_bytes) * _SECONDS_PER_BYTE
        samples = self.sample_bytes * received + looked_through
        latency = exchanges * link.latency * math.log2(devices)
        return StepSeconds(self.rays / devices, update, self.undivided, samples, copies, latency)


def estimate_work(config: RunConfig) -> StepWork:
    """Estimates a step at the final resolution from settings alone, for a GPU."""
    if config.scene.aabb is None:
        # The box is that of the format, or chosen by the images; the number of voxels does not depend on it.
        config = replace(config, scene=replace(config.scene, aabb=((-1.0,) * 3, (1.0,) * 3)))
    model, trainer = untrained_model(config, "meta"), config.trainer
    sparse = model.count_sparse_features()
    dense = round(_ACTIVE_SHARE * (model.count_features(max(trainer.resolutions)) - sparse))
    levels, environment = {id(level) for level in model.grid.levels}, environment_of(model.field)
    others = levels if environment is None else levels | {id(each) for each in environment.parameters()}
    weights = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in others)
    channels = model.grid.channels
    # Multiplications and additions of a forward pass, and twice as many of a backward pass.
    rays = trainer.visible_samples * (6 * weights * _SECONDS_PER_FLOP + channels * _SECONDS_PER_FEATURE)
    return StepWork(
        samples=trainer.visible_samples,
        channels=channels,
        levels=len(levels),
        features=dense + sparse,
        rays=(1 - _LONGEST_RAYS) * rays,
        update=(dense * _UPDATE_BYTES + sparse * _SPARSE_UPDATE_BYTES) * _SECONDS_PER_BYTE,
        undivided=_LAUNCH_SECONDS + _LONGEST_RAYS * rays,
    )


def worthwhile_devices(work: StepWork, steps: int, available: int, link: Link) -> tuple[int, str]:
    """Returns how many devices a training should use, and why.

    Their number is doubled as long as this saves a fifth of the training's time, with the start of the processes.

    Args:
        work: A step at the final resolution.
        steps: Number of steps.
        available: Number of devices.
        link: What connects them.
    """
    devices, seconds = 1, steps * work.on(1, link).total
    reasons = [f"{seconds:.0f} s on 1"]
    while 2 * devices <= available:
        doubled = _START_SECONDS + steps * work.on(2 * devices, link).total
        reasons.append(f"{doubled:.0f} s on {2 * devices}")
        if doubled > _WORTH_DOUBLING * seconds:
            break
        devices, seconds = 2 * devices, doubled
    return devices, f"training is estimated to take {', '.join(reasons)}, {link.bandwidth / 1e9:.0f} GB/s apart"


def measured_link(devices: int) -> Link:
    """Measures the slowest link from the first GPU of this machine to another one.

    This takes a few seconds in a process of its own, so that the present one occupies no memory of the GPUs.

    Args:
        devices: Number of GPUs, at least two.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_slowest_link, devices).result()


def _slowest_link(devices: int) -> Link:
    source, rates = torch.empty(_PROBED_BYTES, dtype=torch.uint8, device="cuda:0"), []
    for index in range(1, devices):
        target = torch.empty_like(source, device=f"cuda:{index}")
        for _ in range(2):  # the first copy establishes the connection
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(index)
            started = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(index)
            seconds = time.perf_counter() - started
        rates.append(_PROBED_BYTES / seconds)
    direct = all(torch.cuda.can_device_access_peer(0, index) for index in range(1, devices))
    return Link(min(rates), direct=direct)


def devices_that_pay(config: RunConfig, available: int, measure: Callable[[int], Link] = measured_link) -> int:
    """Returns how many GPUs of this machine a training should use; logs why in one line.

    Args:
        config: The settings of the training.
        available: Number of GPUs.
        measure: Returns what connects so many of them; only called if several would pay with a fast link.
    """
    work, steps = estimate_work(config), config.trainer.steps
    devices, reason = worthwhile_devices(work, steps, available, NVLINK)
    if devices > 1:
        devices, reason = worthwhile_devices(work, steps, available, measure(available))
    logger.info("devices=auto: %d of %d, because %s", devices, available, reason)
    return devices
