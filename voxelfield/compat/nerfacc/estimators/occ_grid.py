"""Sampling in the occupied cells of nested boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from voxelfield.compat.nerfacc.volrend import render_visibility_from_alpha, render_visibility_from_density
from voxelfield.foundation.checks import check_at_least_one, check_tensor
from voxelfield.grids.boxes import cell_indices
from voxelfield.ops.march_levels import level_intervals

_SamplesFn = Callable[[Tensor, Tensor, Tensor], Tensor]


class OccGridEstimator(nn.Module):
    """Occupied cells in nested boxes, each twice as large as the one before it (Mueller et al. 2022, appendix E.2).

    Checkpoints of nerfacc's class load, and the other way round.

    Args:
        roi_aabb: Lower corner and upper corner of the smallest box: six numbers, world units.
        resolution: Cells of each box along x, y, z, or one number for all three.
        levels: Number of boxes.

    Attributes:
        resolution: Buffer (3,) int32.
        aabbs: Buffer (levels, 6) float32.
        occs: Buffer (levels * X * Y * Z,) float32, decayed maxima of the values of cells; below 0 for cells that no
            camera sees.
        binaries: Buffer (levels, X, Y, Z) bool, the occupied cells; initially none.

    Raises:
        ValueError: ``roi_aabb``, ``resolution`` or ``levels`` is not valid.
    """

    DIM: int = 3

    resolution: Tensor
    aabbs: Tensor
    occs: Tensor
    binaries: Tensor

    def __init__(
        self, roi_aabb: Sequence[float] | Tensor, resolution: int | Sequence[int] | Tensor = 128, levels: int = 1
    ) -> None:
        super().__init__()
        cells = torch.as_tensor([resolution] * 3 if isinstance(resolution, int) else resolution).to("cpu", torch.int32)
        if cells.shape != (3,) or bool((cells < 1).any()):
            raise ValueError(f"resolution must be one or three numbers of cells, each at least 1, got {resolution}")
        check_at_least_one("levels", levels)
        box = torch.as_tensor(roi_aabb, dtype=torch.float32)
        if box.shape != (6,):
            raise ValueError(f"roi_aabb must be six numbers, lower and upper corner, got shape {tuple(box.shape)}")
        centre, half = (box[:3] + box[3:]) / 2, (box[3:] - box[:3]) / 2
        self.levels = levels
        self.cells_per_lvl = int(cells.prod())
        self.register_buffer("resolution", cells)
        corners = [torch.cat((centre - half * 2**level, centre + half * 2**level)) for level in range(levels)]
        self.register_buffer("aabbs", torch.stack(corners))
        self.register_buffer("occs", torch.zeros(levels * self.cells_per_lvl))
        self.register_buffer("binaries", torch.zeros([levels, *cells.tolist()], dtype=torch.bool))

    @property
    def device(self) -> torch.device:
        """The device of the cells."""
        return self.binaries.device

    @torch.no_grad()
    def sampling(
        self,
        rays_o: Tensor,
        rays_d: Tensor,
        sigma_fn: _SamplesFn | None = None,
        alpha_fn: _SamplesFn | None = None,
        near_plane: float = 0.0,
        far_plane: float = 1e10,
        t_min: Tensor | None = None,
        t_max: Tensor | None = None,
        render_step_size: float = 1e-3,
        early_stop_eps: float = 1e-4,
        alpha_thre: float = 0.0,
        stratified: bool = False,
        cone_angle: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Places samples along rays in occupied cells, and drops those that are not visible. Not differentiable.

        Args:
            rays_o: (n_rays, 3) float32 origins, world units.
            rays_d: (n_rays, 3) float32 unit directions.
            sigma_fn: Maps ``(t_starts, t_ends, ray_indices)`` of all samples to densities, per world unit, with which
                samples that are not visible are found. It is not called without samples.
            alpha_fn: The same with opacities; used if there is no ``sigma_fn``.
            near_plane: Distance at which rays begin.
            far_plane: Distance at which they end.
            t_min: (n_rays,) distance before which a ray does not begin.
            t_max: (n_rays,) distance at which a ray ends at the latest.
            render_step_size: Shortest length of a sample's interval.
            early_stop_eps: The least transmittance in front of a visible sample.
            alpha_thre: The least opacity of a visible sample; at most the mean of ``occs``.
            stratified: Shift the samples of each ray by a random fraction of a step, from torch's global generator.
            cone_angle: Length of an interval per distance.

        Returns:
            Ray indices (all_samples,) int64, and where samples begin and end, (all_samples,) float32.

        Raises:
            TypeError: An argument has the wrong type or dtype.
            ValueError: An argument or a result of the function has the wrong shape or device.
        """
        near = torch.full_like(rays_o[..., 0], near_plane)
        far = torch.full_like(rays_o[..., 0], far_plane)
        if t_min is not None:
            near = near.clamp(min=t_min)
        if t_max is not None:
            far = far.clamp(max=t_max)
        if stratified:
            near = near + torch.rand_like(near) * render_step_size
        step = max(render_step_size, 0.0)
        marched = level_intervals(rays_o, rays_d, near, far, self.binaries, self.aabbs, step, cone_angle)
        t_starts, t_ends, ray_indices, *_ = marched
        evaluate = sigma_fn if sigma_fn is not None else alpha_fn
        if evaluate is None or t_starts.shape[0] == 0 or not (alpha_thre > 0.0 or early_stop_eps > 0.0):
            return ray_indices, t_starts, t_ends

        values = evaluate(t_starts, t_ends, ray_indices)
        name = "sigmas" if sigma_fn is not None else "alphas"
        check_tensor(name, values, tuple(t_starts.shape))
        if alpha_thre > 0.0:
            alpha_thre = min(alpha_thre, self.occs.mean().item())
        rule = (None, ray_indices, len(rays_o), early_stop_eps, alpha_thre)
        if sigma_fn is not None:
            visible = render_visibility_from_density(t_starts, t_ends, values, *rule)
        else:
            visible = render_visibility_from_alpha(values, *rule)
        rows = visible.nonzero()[:, 0]
        return ray_indices[rows], t_starts[rows], t_ends[rows]

    @torch.no_grad()
    def update_every_n_steps(
        self,
        step: int,
        occ_eval_fn: Callable[[Tensor], Tensor],
        occ_thre: float = 1e-2,
        ema_decay: float = 0.95,
        warmup_steps: int = 256,
        n: int = 16,
    ) -> None:
        """Evaluates cells and decides anew which are occupied, in every ``n``-th step.

        Args:
            step: The current step.
            occ_eval_fn: Maps positions (M, 3) to values (M, 1) or (M,), usually density times step.
            occ_thre: A cell is occupied if its value exceeds this and, unless the mean of all is higher, the mean.
            ema_decay: Factor applied to earlier values of the cells that are evaluated.
            warmup_steps: Before this step, all cells are evaluated; afterwards, a quarter of the cells, drawn at
                random, and as many occupied ones.
            n: Steps from one update to the next.

        Raises:
            RuntimeError: The module is not in training mode.
            ValueError: ``occ_eval_fn`` returns another shape.
        """
        if not self.training:
            raise RuntimeError("update_every_n_steps must be called in training mode: call .train(), or _update()")
        if step % n == 0:
            self._update(step, occ_eval_fn, occ_thre, ema_decay, warmup_steps)

    @torch.no_grad()
    def mark_invisible_cells(
        self,
        K: Tensor,  # noqa: N803 (nerfacc's name)
        c2w: Tensor,
        width: int,
        height: int,
        near_plane: float = 0.0,
        chunk: int = 32**3,
    ) -> None:
        """Excludes the cells that no camera sees, or that are too near to one; resets the values of the others to 0.

        Args:
            K: (N, 3, 3) or (1, 3, 3) intrinsics, in pixels.
            c2w: (N, 3, 4) or (N, 4, 4) poses, with axes right, down and forward.
            width: Width of the images in pixels.
            height: Height of the images in pixels.
            near_plane: Depth from which a camera sees cells. Those in front of it are excluded.
            chunk: Number of cells per evaluation, to bound memory.

        Raises:
            ValueError: An argument has the wrong shape.
        """
        if c2w.dim() != 3 or c2w.shape[1:] not in ((3, 4), (4, 4)):
            raise ValueError(f"c2w must have shape (N, 3, 4) or (N, 4, 4), got {tuple(c2w.shape)}")
        if K.dim() != 3 or K.shape[1:] != (3, 3) or K.shape[0] not in (1, c2w.shape[0]):
            raise ValueError(f"K must have shape ({c2w.shape[0]}, 3, 3) or (1, 3, 3), got {tuple(K.shape)}")
        to_camera = c2w[:, :3, :3].transpose(1, 2)
        shift = -to_camera @ c2w[:, :3, 3:]
        for level, cells in enumerate(self._all_cells()):
            low, high = self.aabbs[level].split(3)
            for some in cells.split(chunk):
                points = low + self._coordinates(some) / (self.resolution - 1) * (high - low)
                u, v, depth = (K @ (to_camera @ points.T + shift)).unbind(dim=1)  # (N, cells) each
                in_image = (depth >= 0) & (u / depth >= 0) & (u / depth < width)
                in_image &= (v / depth >= 0) & (v / depth < height)
                seen = (in_image & (depth >= near_plane)).any(dim=0) & ~(in_image & (depth < near_plane)).any(dim=0)
                self.occs[level * self.cells_per_lvl + some] = seen.to(self.occs.dtype) - 1

    def _all_cells(self) -> list[Tensor]:
        """Returns for each box the indices of the cells that some camera sees."""
        return [(values >= 0).nonzero()[:, 0] for values in self.occs.view(self.levels, -1)]

    def _some_cells(self, count: int) -> list[Tensor]:
        """Returns for each box the indices of up to twice ``count`` cells: any that are seen, and occupied ones."""
        chosen = []
        for values, occupied in zip(self.occs.view(self.levels, -1), self.binaries.flatten(1), strict=True):
            any_cells = torch.randint(self.cells_per_lvl, (count,), device=self.device)
            any_cells = any_cells[values[any_cells] >= 0]
            full = occupied.nonzero()[:, 0]
            if count < len(full):
                full = full[torch.randint(len(full), (count,), device=self.device)]
            chosen.append(torch.cat((any_cells, full)))
        return chosen

    def _coordinates(self, cells: Tensor) -> Tensor:
        """Returns x, y, z (M, 3) int64 of the cells of a box."""
        return torch.stack(cell_indices(cells, self.binaries.shape[1:]), dim=-1)

    @torch.no_grad()
    def _update(
        self,
        step: int,
        occ_eval_fn: Callable[[Tensor], Tensor],
        occ_thre: float = 0.01,
        ema_decay: float = 0.95,
        warmup_steps: int = 256,
    ) -> None:
        cells_of_levels = self._all_cells() if step < warmup_steps else self._some_cells(self.cells_per_lvl // 4)
        for level, cells in enumerate(cells_of_levels):
            low, high = self.aabbs[level].split(3)
            unit = (self._coordinates(cells) + torch.rand(len(cells), 3, device=self.device)) / self.resolution
            values = occ_eval_fn(low + unit * (high - low))
            if values.shape not in ((len(cells),), (len(cells), 1)):
                wanted = f"({len(cells)}, 1) or ({len(cells)},)"
                raise ValueError(f"occ_eval_fn must return shape {wanted}, got {tuple(values.shape)}")
            values = values.flatten().to(self.occs.dtype)
            occs = self.occs[level * self.cells_per_lvl : (level + 1) * self.cells_per_lvl]
            occs[cells] = occs[cells] * ema_decay
            occs.scatter_reduce_(0, cells, values, "amax")  # a cell may have been drawn twice
        threshold = self.occs[self.occs >= 0].mean().clamp(max=occ_thre)
        self.binaries = (self.occs > threshold).view(self.binaries.shape)
