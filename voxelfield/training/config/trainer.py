"""What the training loop can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from voxelfield.config.parsing import Range
from voxelfield.config.types import BelowOne, Count, Natural, NotNegative, Positive, Resolution
from voxelfield.training.metrics import WINDOW


@dataclass
class StageConfig:
    """One stage of the coarse-to-fine schedule.

    Attributes:
        step: First step of the stage.
        resolution: Cube root of the number of voxels; voxels are cubes, so a flat box gets fewer along its short axes.
            A pyramid switches its levels on up to this.
        crop: Cut the box down to occupied space first.
    """

    step: Natural
    resolution: Resolution
    crop: bool = False


def default_stages() -> list[StageConfig]:
    """Returns the schedule up to a resolution of 400."""
    return [StageConfig(0, 64, crop=True), StageConfig(200, 128), StageConfig(600, 256), StageConfig(1200, 400)]


@dataclass
class OccupancyConfig:
    """Skipping of empty space.

    Attributes:
        resolution: Cells along each axis.
        start: Step of the first update; until then everything counts as occupied.
        every: Steps between updates.
        threshold: Opacity of one sample from which a cell counts as occupied.
    """

    resolution: Count = 128
    start: Natural = 100
    every: Count = 50
    threshold: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.01


@dataclass
class RenderConfig:
    """Sampling of rays; see :class:`voxelfield.rendering.march.RenderSettings`.

    Attributes:
        voxels_per_step: Distance between samples, in voxels.
        min_transmittance: Where a ray stops.
        min_weight: Below which a sample is dropped.
    """

    voxels_per_step: Positive = 0.8
    min_transmittance: BelowOne = 1e-4
    min_weight: BelowOne = 1e-4


@dataclass
class LossConfig:
    """Weights of the loss terms, and when those on the grid apply; :mod:`voxelfield.training.losses` has the terms.

    Attributes:
        sample_rgb: Colour error of single samples.
        ssim: 1 - SSIM of patches of pixels, of which there must be some (``trainer.patches``).
        distortion: How far apart, in world units, the samples lie that contribute to a ray.
        opacity_entropy: Binary entropy of the opacities of rays.
        sparsity: Cauchy penalty on the densities of samples.
        exposure: Squared distance of the exposures of training images from none, with ``trainer.exposure=affine``.
        tv_density: Total variation of the raw density.
        tv_color: Total variation of the colour features.
        tv_every: Steps between applications of total variation (each weighted for all of them).
        tv_until: First step without total variation.
    """

    sample_rgb: NotNegative = 0.005
    ssim: NotNegative = 0.0
    distortion: NotNegative = 0.003
    opacity_entropy: NotNegative = 0.0
    sparsity: NotNegative = 0.0
    exposure: NotNegative = 1e-3
    tv_density: NotNegative = 0.0
    tv_color: NotNegative = 0.0
    tv_every: Count = 10
    tv_until: Natural = 0


@dataclass
class RatesConfig:
    """How fast a run of this length learns: short ones afford higher rates and want a shorter memory.

    Attributes:
        grid: Factor on ``optimizer.grid_lr``.
        network: Factor on ``optimizer.network_lr``.
        decay: Factor on ``optimizer.grid_decay``.
        final_factor: Share of the learning rates that is left after the last step (exponential decay).
        betas: Adam's averaging constants.
    """

    grid: Positive = 1.0
    network: Positive = 1.0
    decay: NotNegative = 1.0
    final_factor: Annotated[float, Range(0, 1, low_open=True)] = 0.05
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)


@dataclass
class EvaluationConfig:
    """The final evaluation.

    Attributes:
        views: Number of test views, evenly spread over the split; null means all.
        supersampling: Side of the square of rays that each pixel is made of; in previews and the video too.
        lpips: Compute LPIPS too, for which ``pip install "voxelfield[lpips]"`` and the weights of VGG16 are needed.
        save_images: Write each rendered view as PNG.
        video_frames: Frames of the orbit video; 0 writes none.
        report: Write ``report.html``, after everything else.
    """

    views: Count | None = None
    supersampling: Count = 2
    lpips: bool = False
    save_images: bool = True
    video_frames: Natural = 120
    report: bool = True


@dataclass
class TrainerConfig:
    """The training loop.

    Attributes:
        steps: Number of optimizer steps.
        rates: What the length of the run asks of the optimizer.
        average_steps: Time constant, in steps, of an exponential moving average of the field's weights that replaces
            them at the end (:class:`voxelfield.training.averaging.WeightAverage`); 0 means no average.
        image_size: Longest image side after downscaling by a whole factor; null keeps images as they are.
        images: Where a GPU finds the training images: in the memory of the ``device``; in pinned memory of the
            ``host``, which it reads over the bus; ``auto``: on the device if they fit. The result is the same.
        background: What transparent pixels are trained against: ``random`` (per pixel), ``white`` or ``black``.
        evaluation_background: What test views are composited over.
        exposure: What is learned of the exposure and white balance of each training image: ``none``, or ``affine``, a
            gain and an offset for each channel (:class:`voxelfield.training.exposure.AffineExposure`).
        max_rays: Rays per step at most.
        supersampling: Side of the square of rays that a training pixel is made of; 1 is its centre.
        patches: Number of squares of neighbouring pixels in each step, beside which pixels are drawn one by one.
        patch_size: Their side in pixels.
        pixel_averaging: What of a pixel's rays is averaged: ``linear_light``, which sRGB values encode, or the
            ``encoded`` values as they are; for ``evaluation.supersampling`` too.
        visible_samples: Visible ray samples per step: on CUDA as many rays count as fit whole, on the CPU the number of
            rays follows.
        candidate_samples: Samples per step, visible or not, that there is memory for (CUDA only); for fields that are
            not marched through in one kernel (:func:`voxelfield.rendering.march.visible_samples`).
        chunk: Rays rendered at once where views are drawn by :func:`voxelfield.rendering.render.render_view`.
        precision: ``float32``, ``bfloat16`` or ``float16`` for decoders other than a :class:`FusedMLPDecoder` (which is
            float16 on CUDA, float32 on the CPU); on CUDA a 16-bit one makes grids be read from float16 copies.
        loss_scale: Factor on gradients, so that they do not underflow in float16; Adam does not notice it.
        finest_resolution: Resolution of the finest level; only an interpolation target for ``stages`` and
            ``model.resolutions``.
        sparse_resolutions: Resolutions of levels that are there only where images show something; likewise only an
            interpolation target.
        stages: Coarse-to-fine schedule; the first stage starts at step 0.
        model_file: What of features the model file of a finished run holds: ``exact`` float16, ``standard`` a byte
            or less, or ``small``, only what training images show, as coarsely as they allow; ``none`` writes no file.
        log_every: Steps between scalars.
        preview_every: Steps between rendered previews; 0 for none.
        preview_views: Number of fixed test views in a preview.
        checkpoint_every: Steps between checkpoints; 0 writes one at the end only.
        keep_checkpoints: Keep all of them; otherwise each takes the place of the one before.
        not_finite: What follows a step whose loss or gradients are not finite: ``stop`` training at the next record, or
            ``skip`` the step by setting its gradients to zero, at the cost of a pass over all gradients in every step.
        checkpoint_errors: What follows where one before the last step cannot be written, as on a full disk:
            ``continue`` training, or ``stop``. Earlier ones stay in either case.
    """

    steps: Count = 13000
    rates: RatesConfig = field(default_factory=RatesConfig)
    average_steps: Natural = 0
    image_size: Count | None = None
    images: Literal["auto", "device", "host"] = "auto"
    background: Literal["random", "white", "black"] = "random"
    evaluation_background: Literal["white", "black"] = "white"
    exposure: Literal["none", "affine"] = "none"
    max_rays: Count = 524288
    supersampling: Count = 2
    patches: Natural = 0
    patch_size: Count = 16
    pixel_averaging: Literal["linear_light", "encoded"] = "linear_light"
    visible_samples: Count = 524288
    candidate_samples: Count = 4194304
    chunk: Count = 65536
    precision: Literal["float32", "bfloat16", "float16"] = "float16"
    loss_scale: Positive = 65536.0
    finest_resolution: Resolution | None = 400
    sparse_resolutions: list[Resolution] = field(default_factory=list)
    stages: list[StageConfig] = field(default_factory=default_stages)
    occupancy: OccupancyConfig = field(default_factory=OccupancyConfig)
    render: RenderConfig = field(default_factory=RenderConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    model_file: Literal["none", "exact", "standard", "small"] = "standard"
    log_every: Count = 100
    preview_every: Natural = 5000
    preview_views: Natural = 3
    checkpoint_every: Natural = 0
    keep_checkpoints: bool = False
    not_finite: Literal["stop", "skip"] = "stop"
    checkpoint_errors: Literal["continue", "stop"] = "continue"

    @property
    def resolutions(self) -> list[int]:
        """The stages' resolutions, in order."""
        return [stage.resolution for stage in self.stages]

    @property
    def pixels_in_patches(self) -> int:
        """Number of pixels of a step that are drawn in squares."""
        return self.patches * self.patch_size**2

    def check(self, name: str) -> None:
        """Raises ValueError where settings do not fit one another."""
        if self.preview_every > 0 and self.preview_views < 1:
            raise ValueError(
                f"{name}.preview_views must be at least 1 unless {name}.preview_every is 0, got {self.preview_views}"
            )
        if self.max_rays < self.supersampling**2:
            raise ValueError(
                f"{name}.max_rays must be at least {name}.supersampling**2 = {self.supersampling**2}, the rays of a "
                f"pixel, got {self.max_rays}"
            )
        if self.pixels_in_patches > self.max_rays // self.supersampling**2:
            raise ValueError(
                f"{name}.patches must have room in {name}.max_rays = {self.max_rays} rays, got {self.patches} patches "
                f"of {self.pixels_in_patches} pixels"
            )
        if self.loss.ssim > 0 and (self.patches == 0 or self.patch_size < WINDOW):
            raise ValueError(
                f"{name}.patches must be positive and {name}.patch_size at least {WINDOW}, the side of SSIM's window, "
                f"where {name}.loss.ssim is positive, got {self.patches} and {self.patch_size}"
            )
        steps = [stage.step for stage in self.stages]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(f"{name}.stages must start at step 0 and have rising steps, got steps {steps}")
        # In a box that is cropped even fewer voxels can be finer ones.
        if any(later.resolution < earlier.resolution and not later.crop for earlier, later in pairwise(self.stages)):
            raise ValueError(
                f"{name}.stages must not become coarser without a crop (the last is {name}.finest_resolution in the "
                f"presets), got resolutions {self.resolutions}"
            )
