"""A whole training on one page, with public names only: pixels, rays, rendering, loss, update, evaluation.

    python examples/train_by_hand.py                       # the bundled scene, about a minute on two cores
    python examples/train_by_hand.py lego --root /data/nerf_synthetic

``python train.py model=dense trainer=cpu`` trains the same field in the same way, with checkpoints, logs and a report.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional as F

from voxelfield import (
    FieldRenderer,
    GridAdam,
    OccupancyGrid,
    RadianceField,
    RenderSettings,
    Scene,
    VoxelGrid,
    load_scene,
    render,
)
from voxelfield.fields.decoders import ColorMLPDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.grids.voxel_grid import cubic_voxels
from voxelfield.rendering.visual_hull import visual_hull

STAGES = {0: 48, 150: 64, 300: 96, 500: 128}  # first step of a stage: cube root of its number of voxels
CROPS = (0, 150)  # steps at which the grid's box shrinks to the occupied cells
FEATURES = 11  # of each vertex, in addition to its density
SAMPLES = 65536  # in a step; the number of rays follows


class Training:
    """A field, the cells in which it is not empty, and its optimizers.

    Args:
        scene: Images with alpha, and cameras; its box bounds everything that they show.
        device: Where to train.
        steps: Number of steps of the whole training, over which learning rates fall.
    """

    def __init__(self, scene: Scene, device: torch.device, steps: int) -> None:
        self.steps, self.rays = steps, SAMPLES // 64
        self.images = scene.train.images.to(device)  # (N, H, W, 4) uint8, straight alpha
        self.cameras = scene.train.cameras.to(device)
        decoder = ColorMLPDecoder(FEATURES, 64, 2, 3, DensityActivation(scale=200.0, initial=0.1))
        grid = VoxelGrid(cubic_voxels(scene.aabb, STAGES[0]), decoder.channels, scene.aabb, init_std=0.1)
        with torch.no_grad():
            grid.features[..., 0] = 0  # equal density everywhere
        self.field = RadianceField(grid, decoder).to(device)
        self.occupancy = OccupancyGrid(64, scene.aabb).to(device)
        self.carve()
        self.grid_optimizer = GridAdam(grid.levels, lr=0.3, betas=(0.9, 0.99), eps=1e-15)
        self.network_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.006, betas=(0.9, 0.99), eps=1e-15)
        self.optimizers = self.grid_optimizer, self.network_optimizer
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(each, self.rate) for each in self.optimizers]

    def rate(self, step: int) -> float:
        """Factor on the learning rates: falls exponentially to 0.3, over the last third of the steps also to zero."""
        done = step / self.steps
        return 0.3**done * min(1.0, (1 - done) / 0.3)

    @property
    def settings(self) -> RenderSettings:
        """Half a voxel between samples; invisible ones are dropped."""
        return RenderSettings(0.5 * float(self.field.grid.voxel_size.min()), 1e-4, 1e-4)

    def carve(self) -> None:
        """Excludes the cells of the grid's box that an image shows as transparent."""
        box, cells = self.field.grid.aabb, tuple(self.occupancy.occupied.shape)
        self.occupancy.restrict(visual_hull(self.images[..., 3], self.cameras, box, cells), box)

    def before_step(self, step: int) -> None:
        """Crops and refines the grid where a stage begins, and finds the occupied cells."""
        grid, occupancy = self.field.grid, self.occupancy
        if step in STAGES:
            box = occupancy.bounds().to(grid.aabb.device) if step in CROPS else None
            grid.resize(STAGES[step], self.grid_optimizer, aabb=box)
            if box is not None:
                self.carve()
        if step >= 100 and (step in STAGES or step % 50 == 0):
            # The threshold is at most the mean, so that a thin mist does not count as empty.
            density = self.field.vertex_density()
            occupancy.update_from_vertices(density, grid.aabb, self.settings.step, 0.01, share_of_mean=0.99)

    def step(self, step: int) -> float:
        """Takes one step; returns the mean squared error of its pixels' colours."""
        self.before_step(step)
        images, height, width, _ = self.images.shape
        pixels = torch.randint(images * height * width, (self.rays,), device=self.images.device)
        view, y, x = pixels // (height * width), pixels // width % height, pixels % width
        rays = self.cameras.rays(view, torch.stack((x, y), dim=1) + 0.5, self.field.aabb)
        color, alpha = (self.images.view(-1, 4)[pixels].float() / 255).split((3, 1), dim=1)
        background = torch.rand_like(color)  # so that transparent space becomes empty
        truth = color * alpha + background * (1 - alpha)

        rendering = render(self.field, rays, self.occupancy, self.settings, jitter=True)
        error = F.mse_loss(rendering.over(background), truth)
        # Each sample's colour is compared too (DirectVoxGO), so that wrong colours cannot average to the right one.
        samples = (rendering.sample_rgb - truth[rendering.samples.ray_index]).square().sum(dim=1)
        loss = error + 0.05 * (rendering.weights.detach() * samples).sum() / self.rays

        self.network_optimizer.zero_grad()  # the grid's clears gradients as it reads them
        loss.backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        fitting = self.rays * SAMPLES / max(len(rendering.weights), 1)
        self.rays = int(min(4096, max(0.8 * self.rays, min(1.25 * self.rays, fitting)) + 1))
        return float(error.detach())

    def psnr(self, scene: Scene) -> float:
        """Renders all test views over white; returns their mean PSNR, dB."""
        white = torch.ones(3, device=self.images.device)
        renderer = FieldRenderer(self.field, self.occupancy, self.settings, white)
        values = []
        for index in range(len(scene.test)):
            color, alpha = (scene.test.image(index).to(white.device).float() / 255).split((3, 1), dim=2)
            error = F.mse_loss(renderer.view(scene.test.cameras, index).rgb, color * alpha + 1 - alpha)
            values.append(-10 * float(error.log10()))
        return sum(values) / len(values)


def main() -> None:
    """Trains, and prints the error, the seconds and the quality of the test views."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", nargs="?", default="bricks")
    parser.add_argument("--root", default="data", help="folder of scenes")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    scene = load_scene(options.scene, root=options.root, image_size=200)
    training = Training(scene, torch.device(options.device), options.steps)
    start = time.perf_counter()
    for step in range(options.steps):
        error = training.step(step)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: error {error:.5f}, {training.rays} rays, {time.perf_counter() - start:.0f} s")
    print(f"test views: {training.psnr(scene):.2f} dB")


if __name__ == "__main__":
    main()
