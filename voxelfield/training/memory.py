"""The estimated memory of a run, checked before training starts on a GPU and reported when memory runs out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from voxelfield import processes
from voxelfield.components.registry import active
from voxelfield.datasets.scene import Split
from voxelfield.foundation.errors import is_out_of_memory
from voxelfield.grids.working_copies import copies_dtype
from voxelfield.models.model import Model
from voxelfield.models.pixel_sampler import Images, pixel_number_type
from voxelfield.models.training import MemoryEstimate
from voxelfield.settings import RunConfig
from voxelfield.training.optimizer import moments_dtype

logger = logging.getLogger(__name__)


def estimate_memory(
    model: Model, config: RunConfig, split: Split, device_type: str = "cuda", images: Images = "device"
) -> MemoryEstimate:
    """Estimates the peak memory use of training steps in each process: on CUDA, accurate up to allocator overhead.

    The model is at its initial resolution, and may be on the device ``meta``. On the CPU, candidate samples are left
    out, because their number is not limited. Previews and the evaluation need additional memory: for ``trainer.chunk``
    rays at once, or for the copies that :class:`voxelfield.FieldRenderer` makes, which for spherical harmonics are
    twice the finest grid in float16.
    """
    count, trainer, components = processes.count(), config.trainer, active(config)
    copies = copies_dtype(trainer.precision, torch.device(device_type))
    estimate = model.estimate_memory(
        max(trainer.resolutions),
        rays=trainer.max_rays // count,
        candidates=0 if device_type == "cpu" else trainer.candidate_samples // count,
        visible=trainer.visible_samples // count,
        copies=copies,
        moments=moments_dtype(config.optimizer.moments, copies, trainer.rates.betas),
        feature_bytes=sum(settings.feature_bytes for settings in components),
    )
    if count > 1:
        # Each process has a part of everything that belongs to the grids, but whole copies, which are the grids
        # themselves in float32. It receives the positions and gradients of the samples of all.
        received = trainer.visible_samples * (12 + model.grid.channels * copies.itemsize)
        parts = {name: getattr(estimate, name) // count for name in ("gradients", "optimizer", "average", "sparse")}
        if copies != torch.float32:
            # After the last step, masters are whole, but there are no gradients.
            parts["parameters"] = max(estimate.parameters - parts["gradients"], estimate.parameters // count)
        estimate = replace(estimate, samples=estimate.samples + received, **parts)
    if images == "host":
        return estimate
    numbers = 0 if split.masks is None else int(split.masks.sum()) * pixel_number_type(split).itemsize
    weights = split.images[..., 0].numel() * sum(settings.pixel_bytes for settings in components)
    carried = sum(values.numel() * values.itemsize for values in split.extras.values() if values.dim() >= 3)
    local = split.images.numel() + numbers + weights + carried
    # Where all are wanted, there is a moment in which the local ones are there twice.
    gathers = split.local_slice is not None and images == "device"
    return replace(estimate, images=local + local * len(split) // len(split.local_indices) if gathers else local)


def place_of_images(
    estimate: Callable[[Images], MemoryEstimate], requested: str, device: torch.device, divided: bool
) -> Images:
    """Returns where training images should be, the same in all processes; a collective call.

    That is where the setting ``trainer.images`` requests them or, on a GPU, where the estimated memory suffices. They
    are ``divided`` if each process has a ``local_slice`` of them.
    """
    if device.type != "cuda":
        return "local"
    places: tuple[Images, ...] = ("device", "local", "host") if divided else ("device", "host")
    *tried, last = {"auto": places, "device": places[:-1], "host": places[-1:]}[requested]
    free = _free(device)
    chosen = next((place for place in tried if not processes.any_of(estimate(place).total > free)), last)
    if chosen == "host":
        logger.info("training images stay in pinned host memory, from which the GPU reads the pixels that it samples")
    elif chosen == "local" and divided:
        logger.info("each GPU has only some of the training images, because all of them do not fit in its memory")
    return chosen


def _free(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_memory(estimate: MemoryEstimate, device: torch.device) -> None:
    """Raises ValueError, which says which settings to reduce, if training does not fit in the memory of a GPU."""
    logger.info("training needs about %s of GPU memory", estimate)
    if estimate.total > _free(device):
        raise ValueError(
            f"training needs about {estimate} of GPU memory, but {_free(device) / 2**30:.2f} GiB are free on {device}: "
            f"lower {_largest_savings(estimate, device)}"
        )


@contextlib.contextmanager
def explain_shortage(estimate: Callable[[], MemoryEstimate], device: torch.device) -> Iterator[None]:
    """Replaces an out-of-memory error of a block by one line on what needs memory and which settings to reduce.

    The memory that training needs is estimated only then. The error is a torch.OutOfMemoryError on every device.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        needed = estimate()
        raise torch.OutOfMemoryError(
            f"not enough memory on {device}: training needs about {needed}; lower {_largest_savings(needed, device)}"
        ) from error


def _largest_savings(needed: MemoryEstimate, device: torch.device) -> str:
    """Returns the three settings that save the most memory, in descending order."""
    samples = "trainer.visible_samples" if device.type == "cpu" else "trainer.visible_samples (and candidate_samples)"
    savings = {
        # Half the resolution means an eighth of the vertices, half the width a quarter of the pixels.
        "trainer.finest_resolution (in Python, the last of trainer.stages)": 7 / 8 * (needed.grids - needed.sparse),
        "model.max_blocks": needed.sparse / 2,
        samples: needed.samples / 2,
        "trainer.image_size (in Python, that of load_scene)": 3 / 4 * needed.images,
        "trainer.average_steps (0 disables averaging)": needed.average,
    }
    return ", ".join(sorted(savings, key=lambda name: -savings[name])[:3])
