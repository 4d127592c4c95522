"""What a training run can be told, with types; the values live in ``configs/``."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf

from voxelfield.ops._internal.pixel_colors import TRANSFERS


@dataclass
class StageConfig:
    """One stage of the coarse-to-fine schedule.

    Attributes:
        step: First step of the stage.
        resolution: Cube root of the number of voxels; voxels are cubes, so a flat box gets fewer along its short axes.
            A pyramid switches its levels on up to this.
        crop: Cut the box down to occupied space first.
    """

    step: int = MISSING
    resolution: int = MISSING
    crop: bool = False


@dataclass
class OccupancyConfig:
    """Skipping of empty space.

    Attributes:
        resolution: Cells along each axis.
        start: Step of the first update; until then everything counts as occupied.
        every: Steps between updates.
        threshold: Opacity of one sample from which a cell counts as occupied.
    """

    resolution: int = MISSING
    start: int = MISSING
    every: int = MISSING
    threshold: float = MISSING


@dataclass
class RenderConfig:
    """Sampling of rays; see :class:`voxelfield.rendering.RenderSettings`.

    Attributes:
        voxels_per_step: Distance between samples, in voxels.
        min_transmittance: Where a ray stops.
        min_weight: Below which a sample is dropped.
    """

    voxels_per_step: float = MISSING
    min_transmittance: float = MISSING
    min_weight: float = MISSING


@dataclass
class LossConfig:
    """Weights of the loss terms; see :mod:`voxelfield.training.losses`.

    Attributes:
        sample_rgb: Colour error of single samples.
        distortion: How far apart along its ray the matter lies that a pixel shows, world units.
        opacity_entropy: Undecided pixels.
        sparsity: Density of samples.
        tv_density: Total variation of the raw density.
        tv_color: Total variation of the colour features.
        tv_every: Steps between applications of total variation (each weighted for all of them).
        tv_until: First step without total variation.
    """

    sample_rgb: float = MISSING
    distortion: float = MISSING
    opacity_entropy: float = MISSING
    sparsity: float = MISSING
    tv_density: float = MISSING
    tv_color: float = MISSING
    tv_every: int = MISSING
    tv_until: int = MISSING


@dataclass
class RatesConfig:
    """How fast a run of this length learns: short ones afford higher rates and want a shorter memory.

    Attributes:
        grid: Factor on ``optimizer.grid_lr``.
        network: Factor on ``optimizer.network_lr``.
        final: Share of the learning rates that is left after the last step (exponential decay).
        betas: Adam's averaging constants.
    """

    grid: float = 1.0
    network: float = 1.0
    final: float = 1.0
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass
class EvaluationConfig:
    """The final evaluation.

    Attributes:
        views: Number of test views, evenly spread over the split; null means all.
        supersampling: Side of the square of rays that each pixel is made of; in previews and the video too.
        save_images: Write each rendered view as PNG.
        video_frames: Frames of the orbit video; 0 writes none.
    """

    views: int | None = None
    supersampling: int = 1
    save_images: bool = True
    video_frames: int = 0


@dataclass
class TrainerConfig:
    """The training loop.

    Attributes:
        steps: Number of optimizer steps.
        rates: What the length of the run asks of the optimizer.
        average_steps: Makes the field in the end the mean of what it was in the last steps: the time constant of an
            exponential moving average of its weights (:class:`voxelfield.training.averaging.WeightAverage`); 0: none.
        image_size: Longest image side after downscaling by a whole factor; null keeps images as they are.
        background: What transparent pixels are trained against: ``random`` (per pixel), ``white`` or ``black``.
        evaluation_background: What test views are composited over.
        max_rays: Rays per step at most.
        supersampling: Side of the square of rays that a training pixel is made of; 1 is its centre.
        transfer: How image values encode light, in which a pixel's rays are averaged: ``srgb``, or ``linear``, by which
            values are averaged as they are; for ``evaluation.supersampling`` too. Runs that do not say are ``linear``.
        samples: Visible ray samples per step: on CUDA as many rays count as fit whole, on the CPU the number of rays
            follows.
        marched: Samples per step, visible or not, that there is memory for (CUDA only); for fields that are not marched
            through in one kernel (:func:`voxelfield.rendering.visible_samples`).
        chunk: Rays rendered at once where views are drawn by :func:`voxelfield.rendering.render_view`.
        precision: ``float32``, ``bfloat16`` or ``float16`` for decoders other than a :class:`NetworkDecoder` (which is
            float16 on CUDA, float32 on the CPU); on CUDA a 16-bit one makes grids be read from float16 copies.
        loss_scale: Factor on gradients, so that they do not underflow in float16; Adam does not notice it.
        finest: Resolution of the finest level, for ``stages`` and ``model.resolutions`` to refer to, and they alone.
        stages: Coarse-to-fine schedule; the first stage starts at step 0.
        log_every: Steps between scalars.
        preview_every: Steps between rendered previews; 0 for none.
        preview_views: Number of fixed test views in a preview.
        checkpoint_every: Steps between checkpoints; 0 writes one at the end only.
        keep_checkpoints: Keep all of them; otherwise each takes the place of the one before.
    """

    steps: int = MISSING
    rates: RatesConfig = field(default_factory=RatesConfig)
    average_steps: int = 0
    image_size: int | None = None
    background: str = MISSING
    evaluation_background: str = MISSING
    max_rays: int = MISSING
    supersampling: int = MISSING
    transfer: str = "linear"
    samples: int = MISSING
    marched: int = MISSING
    chunk: int = MISSING
    precision: str = MISSING
    loss_scale: float = 1.0
    finest: int | None = None
    stages: list[StageConfig] = field(default_factory=list)
    occupancy: OccupancyConfig = field(default_factory=OccupancyConfig)
    render: RenderConfig = field(default_factory=RenderConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    log_every: int = MISSING
    preview_every: int = MISSING
    preview_views: int = MISSING
    checkpoint_every: int = MISSING
    keep_checkpoints: bool = False

    def __post_init__(self) -> None:
        _choice("trainer.background", self.background, ("random", "white", "black"))
        _choice("trainer.evaluation_background", self.evaluation_background, ("white", "black"))
        _choice("trainer.transfer", self.transfer, TRANSFERS)
        _choice("trainer.precision", self.precision, ("float32", "bfloat16", "float16"))
        positive = ("steps", "max_rays", "supersampling", "samples", "marched", "chunk", "log_every")
        counts = {name: getattr(self, name) for name in positive}
        counts |= {"occupancy.every": self.occupancy.every, "loss.tv_every": self.loss.tv_every}
        counts["evaluation.supersampling"] = self.evaluation.supersampling
        if self.preview_every > 0:
            counts["preview_views"] = self.preview_views
        if self.evaluation.views is not None:
            counts["evaluation.views"] = self.evaluation.views
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"trainer.{name} must be at least 1, got {count}")
        if self.max_rays < self.supersampling**2:
            raise ValueError(
                f"trainer.max_rays must be at least trainer.supersampling**2 = {self.supersampling**2}, the rays of a "
                f"pixel, got {self.max_rays}"
            )
        rates = {f"rates.{name}": getattr(self.rates, name) for name in ("grid", "network", "final")}
        for name, number in {"loss_scale": self.loss_scale, **rates}.items():
            if not number > 0:
                raise ValueError(f"trainer.{name} must be positive, got {number}")
        if len(self.rates.betas) != 2:
            raise ValueError(f"trainer.rates.betas must be two numbers, got {list(self.rates.betas)}")
        if self.average_steps < 0:
            raise ValueError(f"trainer.average_steps must not be negative, got {self.average_steps}")
        steps = [stage.step for stage in self.stages]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(f"trainer.stages must start at step 0 and have rising steps, got steps {steps}")
        resolutions = [stage.resolution for stage in self.stages]
        # In a box that is cropped even fewer voxels can be finer ones.
        if any(later.resolution < earlier.resolution and not later.crop for earlier, later in pairwise(self.stages)):
            raise ValueError(
                "trainer.stages must not become coarser without a crop (the last is trainer.finest in the presets), "
                f"got resolutions {resolutions}"
            )
        if min(resolutions) < 2:
            raise ValueError("trainer.stages must have resolutions of at least 2")


@dataclass
class OptimizerConfig:
    """AdamW.

    Attributes:
        grid_lr: Learning rate of grids.
        network_lr: Learning rate of everything else.
        view_lr: Share of ``grid_lr`` at which channels learn that only matter for the viewing direction, harmonics of
            colour beyond the constant one (``view_channels`` of a :class:`voxelfield.decoders.Decoder`); 3D Gaussian
            Splatting (Kerbl et al. 2023) uses 1/20 for its harmonics. 1 for a decoder without such channels.
        eps: Adam's floor on the root of the second moment.
        grid_decay: Decoupled weight decay of grids (Loshchilov and Hutter 2019), at the vertices that a step updates:
            what rays do not hold up sinks to zero.
        network_decay: Decoupled weight decay of everything else.
        skip_untouched: Leave vertices alone, moments too, that no sample of the step was near.
    """

    grid_lr: float = MISSING
    network_lr: float = MISSING
    view_lr: float = 1.0
    eps: float = 1e-15
    grid_decay: float = 0.0
    network_decay: float = 0.0
    skip_untouched: bool = False

    def __post_init__(self) -> None:
        for name in ("grid_lr", "network_lr", "view_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optimizer.{name} must be positive, got {getattr(self, name)}")


Config = TypeVar("Config")


def parse(schema: type[Config], values: DictConfig, name: str) -> Config:
    """Checks a part of the composed configuration against its dataclass.

    Args:
        schema: One of this module's dataclasses.
        values: That part of the configuration.
        name: Where it stands, for messages.

    Returns:
        An instance of ``schema``.

    Raises:
        ValueError: A key is unknown, missing or has the wrong type or value.
    """
    try:
        # Values may refer to others anywhere in the configuration, which are out of reach once this part stands alone.
        resolved = OmegaConf.create(OmegaConf.to_container(values, resolve=True))
        merged: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), resolved))
    except Exception as error:
        # OmegaConf names the key in a later line of its message, if at all.
        key = getattr(error, "full_key", None)
        reason = f"{key}: {str(error).splitlines()[0]}" if key else str(error).splitlines()[0]
        raise ValueError(f"configuration of {name}: {reason}") from error
    assert isinstance(merged, schema)
    return merged


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
