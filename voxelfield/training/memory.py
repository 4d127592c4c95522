"""Estimates of a run's memory use, checked before training starts on a GPU and reported when memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from voxelfield.datasets.scene import Split
from voxelfield.fields.field import RadianceField
from voxelfield.models.gridless import grid_of
from voxelfield.models.model_config import ModelConfig
from voxelfield.ops._errors import is_out_of_memory
from voxelfield.rendering.march import MAX_VISIBLE_PER_RAY
from voxelfield.training.batches import pixel_number_type
from voxelfield.training.config import TrainerConfig
from voxelfield.training.optimizer import copies_dtype

_GIB = 2**30
_FLOAT = 4

# Bytes that march_rays and select_samples store per sample: position, t, dt and ray index.
_PACKED_SAMPLE = 12 + 4 + 4 + 8
# 16-bit numbers that the networks hold at the same time per visible sample, in addition to its features and their
# gradient: inputs and outputs of both networks, and the gradients of all of these.
_DECODED_SAMPLE = 128


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of device memory, by use.

    Attributes:
        parameters: Grids at their final resolution, float32.
        gradients: Accumulated gradients of the grids, float32.
        optimizer: Adam's two moments.
        copies: Working copies of the grids, if these are not the parameters themselves.
        average: Moving average of the grids' weights, if enabled.
        images: Training images, 8-bit RGBA, with masks the indices of the pixels that count, and with
            ``trainer.loss.structure`` their weights; 0 if a GPU reads them from host memory.
        samples: Ray samples of a step, and everything computed from them.
        sparse: The share of sparse levels in the first five, if they have as many blocks as they may.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    average: int
    images: int
    samples: int
    sparse: int = 0

    @property
    def total(self) -> int:
        """The sum over all uses."""
        return self.grids + self.images + self.samples

    @property
    def grids(self) -> int:
        """Bytes that grow with the number of the grids' features."""
        return self.parameters + self.gradients + self.optimizer + self.copies + self.average

    def __str__(self) -> str:
        """Returns one line with all uses, in GiB."""
        parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in asdict(self).items() if name != "sparse")
        return f"{self.total / _GIB:.2f} GiB ({parts})"


def estimate_memory(
    field: RadianceField,
    model_config: ModelConfig,
    config: TrainerConfig,
    split: Split,
    device_type: str = "cuda",
    *,
    images_on_host: bool = False,
) -> MemoryEstimate:
    """Estimates the peak memory use of training steps: on CUDA, accurate up to allocator overhead.

    On the CPU, candidate samples are left out, because their number is not limited.

    Previews and the evaluation need additional memory: for ``config.chunk`` rays at once, or for the copies that
    :class:`voxelfield.FieldRenderer` makes, which for spherical harmonics are twice the finest grid in float16.

    Args:
        field: The field, at its initial resolution.
        model_config: The model_config that built the field.
        config: Settings of the training loop.
        split: The training images.
        device_type: ``cuda`` or ``cpu``.
        images_on_host: Whether the images stay in host memory.
    """
    values = model_config.count_features(field, max(config.resolutions))
    copies = copies_dtype(config.precision, torch.device(device_type))
    width = copies.itemsize
    grid = grid_of(field)
    channels = 0 if grid is None else grid.channels
    if device_type == "cpu":
        candidates = 0
    elif copies == torch.float16 and getattr(field, "pyramid_density", lambda: None)() is not None:
        candidates = config.max_rays * MAX_VISIBLE_PER_RAY * _FLOAT  # distances that march_visible stores per ray
    else:
        candidates = config.candidate_samples * (_PACKED_SAMPLE + width * (channels + 16))
    numbers = 0 if split.masks is None else int(split.masks.sum()) * pixel_number_type(split.masks).itemsize
    weights = split.images[..., 0].numel() if config.loss.structure > 0 else 0
    visible = config.visible_samples * (_PACKED_SAMPLE + width * (2 * channels + _DECODED_SAMPLE))
    estimate = MemoryEstimate(
        parameters=_FLOAT * values,
        gradients=_FLOAT * values,
        optimizer=2 * _FLOAT * values,
        copies=0 if copies == torch.float32 else width * values,
        average=_FLOAT * values if config.average_steps > 0 else 0,
        images=0 if images_on_host else split.images.numel() + numbers + weights,
        samples=candidates + visible,
    )
    return replace(estimate, sparse=estimate.grids * model_config.count_sparse_features(field) // max(values, 1))


def images_stay_on_host(requested: str, estimate: MemoryEstimate, device: torch.device) -> bool:
    """Returns whether a GPU should read the training images from host memory.

    Args:
        requested: ``trainer.images``.
        estimate: Memory that training needs with the images on the device.
        device: Device of the training; always False on a CPU.
    """
    if device.type != "cuda":
        return False
    return requested == "host" or (requested == "auto" and estimate.total > _free(device))


def _free(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_memory(estimate: MemoryEstimate, device: torch.device) -> None:
    """Raises if training does not fit in memory.

    Args:
        estimate: The estimated memory use.
        device: A CUDA device; others are not checked.

    Raises:
        ValueError: More memory is needed than is free; the message says which settings to reduce.
    """
    if device.type != "cuda":
        return
    if estimate.total > _free(device):
        if estimate.sparse > max(estimate.grids / 2, estimate.samples):
            advice = "a lower model.max_blocks"
        elif estimate.grids > estimate.samples:
            advice = "a lower trainer.finest_resolution (in Python, the last of trainer.stages) or fewer channels"
        else:
            advice = "lower trainer.visible_samples, trainer.max_rays and trainer.candidate_samples"
        raise ValueError(
            f"training needs about {estimate} of GPU memory, but {_free(device) / _GIB:.2f} GiB are free on {device}: "
            f"use {advice}"
        )


@contextlib.contextmanager
def explain_shortage(estimate: Callable[[], MemoryEstimate], device: torch.device) -> Iterator[None]:
    """Replaces an out-of-memory error by one line on what training needs memory for and which settings to reduce.

    Args:
        estimate: Returns the memory that training needs; only called in case of an error.
        device: Device of the training.

    Raises:
        torch.OutOfMemoryError: The code in the ``with`` block ran out of memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        needed = estimate()
        raise torch.OutOfMemoryError(
            f"not enough memory on {device}: training needs about {needed}; lower {', '.join(_knobs(needed, device))}"
        ) from error


def _knobs(needed: MemoryEstimate, device: torch.device) -> list[str]:
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
    return sorted(savings, key=lambda name: -savings[name])[:3]
