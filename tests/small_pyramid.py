"""Settings of a small pyramid that trains in a few seconds on a CPU."""

from __future__ import annotations

from quick_presets import preset

from voxelfield.settings import RunConfig


def settings(*overrides: str) -> RunConfig:
    """Returns the settings, with overrides as on the command line."""
    return preset(
        "model=pyramid",
        "trainer=cpu",
        "model.resolutions=[8,16,32]",
        "model.width=32",
        "model.hidden=1",
        "trainer.image_size=null",
        "trainer.max_rays=600",
        "trainer.visible_samples=16384",
        "trainer.finest_resolution=32",
        "trainer.stages=[{step:0,resolution:16,crop:true},{step:40,resolution:32,crop:true}]",
        "trainer.render.voxels_per_step=0.5",
        "trainer.render.min_transmittance=1e-4",
        "trainer.render.min_weight=1e-4",
        "trainer.occupancy.resolution=16",
        "trainer.occupancy.start=20",
        "trainer.occupancy.every=20",
        "trainer.preview_every=0",
        "optimizer.grid_lr=0.05",
        "trainer.evaluation.views=null",
        *overrides,
        device="cpu",
    )
