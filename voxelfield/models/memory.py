"""The estimated memory of a training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

_GIB = 2**30


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
