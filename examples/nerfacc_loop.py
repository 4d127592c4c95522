"""A training loop in nerfacc's terms, on the bundled scene: with nerfacc itself, or on voxelfield's kernels.

    python examples/nerfacc_loop.py                      # CUDA if there is a GPU, else the CPU
    python examples/nerfacc_loop.py --backend nerfacc    # needs nerfacc, nvcc and a GPU

Everything but the import is the same for both: an occupancy grid, packed samples, volume rendering.
"""

from __future__ import annotations

import argparse
import importlib
import time
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voxelfield import Scene, VoxelGrid, load_scene

BACKENDS = {"nerfacc": "nerfacc", "voxelfield": "voxelfield.compat.nerfacc"}
AABB = [-1.5, -1.5, -1.5, 1.5, 1.5, 1.5]
STEP_SIZE = 0.02


class Field(nn.Module):
    """Density and colour from a grid of features and a small network."""

    def __init__(self, channels: int = 8, width: int = 64) -> None:
        super().__init__()
        self.grid = VoxelGrid(80, channels, aabb=torch.tensor(AABB).view(2, 3), init_std=0.1)
        self.color = nn.Sequential(
            *(nn.Linear(channels + 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
        )

    def density(self, points: Tensor) -> Tensor:
        """Returns densities (M,) at positions (M, 3), per world unit."""
        return F.softplus(10 * self.grid(points)[:, 0] - 2)

    def forward(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns colours (M, 3) and densities (M,) at positions seen along directions (M, 3)."""
        features = self.grid(points)
        colors = torch.sigmoid(self.color(torch.cat((features[:, 1:], directions), dim=-1)))
        return colors, F.softplus(10 * features[:, 0] - 2)


class Loop:
    """The state of one training: the field, the occupancy grid, the optimizer and the pixels.

    Args:
        nerfacc: The module to use, nerfacc or voxelfield.compat.nerfacc.
        scene: The scene, in the box from -1.5 to 1.5.
        device: Where to train.
        rays: Rays of a step.
    """

    def __init__(self, nerfacc: ModuleType, scene: Scene, device: torch.device, rays: int) -> None:
        self.nerfacc, self.scene, self.device, self.rays = nerfacc, scene, device, rays
        torch.manual_seed(0)
        self.field = Field().to(device)
        self.estimator = nerfacc.OccGridEstimator(AABB, resolution=64).to(device)
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.field.grid.parameters(), "lr": 2e-2},
                {"params": self.field.color.parameters(), "lr": 2e-3},
            ]
        )
        cameras = scene.train.cameras.to(device)
        self.images = scene.train.images.to(device)
        self.box = torch.tensor(AABB, device=device).view(2, 3)
        every_ray = [cameras.image_rays(view, self.box) for view in range(len(cameras))]
        self.origins = torch.cat([rays.origins for rays in every_ray])
        self.directions = torch.cat([rays.directions for rays in every_ray])
        self.done = 0

    def render(self, origins: Tensor, directions: Tensor, background: Tensor) -> tuple[Tensor, int]:
        """Returns the colours of rays, and the number of samples of which they are made."""

        def positions(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> Tensor:
            return origins[ray_indices] + directions[ray_indices] * ((t_starts + t_ends) / 2)[:, None]

        def sigma_fn(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> Tensor:
            return self.field.density(positions(t_starts, t_ends, ray_indices))

        def rgb_sigma_fn(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
            return self.field(positions(t_starts, t_ends, ray_indices), directions[ray_indices])

        ray_indices, t_starts, t_ends = self.estimator.sampling(
            origins,
            directions,
            sigma_fn=sigma_fn,
            near_plane=0.5,
            render_step_size=STEP_SIZE,
            alpha_thre=1e-3,
            stratified=self.estimator.training,
        )
        colors, _, _, _ = self.nerfacc.rendering(
            t_starts,
            t_ends,
            ray_indices,
            n_rays=origins.shape[0],
            rgb_sigma_fn=rgb_sigma_fn,
            render_bkgd=background,
        )
        return colors, ray_indices.shape[0]

    def step(self) -> tuple[float, int]:
        """Makes one step; returns its loss and its number of samples."""
        self.estimator.update_every_n_steps(
            step=self.done, occ_eval_fn=lambda points: self.field.density(points)[:, None] * STEP_SIZE, warmup_steps=64
        )
        pixels = torch.randint(self.origins.shape[0], (self.rays,), device=self.device)
        truth = self.images.view(-1, 4)[pixels].float() / 255
        background = torch.rand(3, device=self.device)
        truth = truth[:, :3] * truth[:, 3:] + background * (1 - truth[:, 3:])
        colors, samples = self.render(self.origins[pixels], self.directions[pixels], background)
        loss = F.smooth_l1_loss(colors, truth)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return loss.item(), samples

    @torch.no_grad()
    def psnr(self, view: int) -> float:
        """Renders a test view before white, and returns its quality in dB."""
        self.estimator.eval()
        rays = self.scene.test.cameras.to(self.device).image_rays(view, self.box)
        white = torch.ones(3, device=self.device)
        chunks = zip(rays.origins.split(8192), rays.directions.split(8192), strict=True)
        colors = torch.cat([self.render(*chunk, white)[0] for chunk in chunks])
        truth = self.scene.test.images[view].to(self.device).view(-1, 4).float() / 255
        error = F.mse_loss(colors, truth[:, :3] * truth[:, 3:] + 1 - truth[:, 3:])
        self.estimator.train()
        return -10 * torch.log10(error).item()


def main() -> None:
    """Trains, and prints losses, seconds and the quality of a test view."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="voxelfield")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rays", type=int, default=1024)
    options = parser.parse_args()
    module = importlib.import_module(BACKENDS[options.backend])
    loop = Loop(module, load_scene("bricks"), torch.device(options.device), options.rays)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        loss, samples = loop.step()
        if step % 100 == 0 or step == options.steps:
            seconds = (time.perf_counter() - start) / step
            print(f"step {step}: loss {loss:.5f}, {samples / options.rays:.1f} samples a ray, {seconds:.4f} s a step")
    print(f"test view 0: {loop.psnr(0):.2f} dB")


if __name__ == "__main__":
    main()
