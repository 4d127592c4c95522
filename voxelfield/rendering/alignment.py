"""Alignment of cameras between two frames that differ by rotation, translation and scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rigid import turning_angles


@dataclass(frozen=True, eq=False)
class Similarity:
    """Maps a point p to ``scale * rotation @ p + translation``, by a scale above 0 and float64 tensors on the CPU."""

    scale: float
    rotation: Tensor
    translation: Tensor

    def cameras(self, cameras: Cameras) -> Cameras:
        """Returns the cameras moved along with a scene that is mapped, on their device; their images do not change."""
        c2w = cameras.c2w.double().cpu().clone()
        c2w[:, :3, :3] = self.rotation @ c2w[:, :3, :3]
        c2w[:, :3, 3] = self.scale * c2w[:, :3, 3] @ self.rotation.T + self.translation
        rolling = cameras.rolling
        if rolling is not None:
            rolling = rolling * rolling.new_tensor([1, 1, 1, *3 * (self.scale,), 1])
        return replace(cameras, c2w=c2w.float().to(cameras.c2w.device), rolling=rolling)


def align_cameras(source: Cameras, target: Cameras, *, rotations: bool = True) -> Similarity:
    """Finds the similarity transform that best maps some cameras to others.

    The rotation is the least-squares fit to two sets of correspondences: the vectors from the cameras' mean position to
    each camera, relative to their spread, and, with ``rotations``, the cameras' axes. Scale and translation are then
    fitted to the positions (Umeyama 1991).

    Args:
        source: N cameras, at least one.
        target: N cameras, to which those are mapped.
        rotations: Whether the cameras' axes are fitted as well. Without them, at least three positions that are not
            collinear are needed, and the result is the alignment with which BARF (Lin et al. 2021) measures poses.

    Returns:
        The similarity. Its scale is 1 if all cameras of either set are at the same position.

    Raises:
        ValueError: There are no cameras, or the numbers of cameras differ.
    """
    if len(source) != len(target) or len(source) == 0:
        raise ValueError(
            f"target must have as many cameras as source, at least one, got {len(target)} and {len(source)}"
        )
    (of_source, middle_source), (of_target, middle_target) = _centred(source), _centred(target)
    # The roots of the mean squared distances.
    spreads = [float(each.square().sum(dim=1).mean().sqrt()) for each in (of_source, of_target)]
    together = torch.zeros(3, 3, dtype=torch.float64)
    if min(spreads) > 0:
        together += of_target.T @ of_source / (spreads[0] * spreads[1])
    if rotations:
        together += torch.einsum("nik,njk->ij", _axes(target), _axes(source))
    u, _, vh = torch.linalg.svd(together)
    # The nearest orthogonal matrix that is not a reflection.
    u[:, 2] *= torch.linalg.det(u @ vh).sign()
    rotation = u @ vh
    scale = 1.0
    if min(spreads) > 0:
        scale = float((of_target * (of_source @ rotation.T)).sum() / of_source.square().sum())
    return Similarity(scale, rotation, middle_target - scale * rotation @ middle_source)


def pose_errors(cameras: Cameras, truth: Cameras, *, rotations: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the errors of poses after alignment to the true ones: (N,) degrees and (N,) units of ``truth``; float64.

    ``rotations`` is as for :func:`align_cameras`; its default follows common practice.
    """
    aligned = align_cameras(cameras, truth, rotations=rotations).cameras(cameras)
    angles = turning_angles(_axes(aligned), _axes(truth))
    away = (aligned.c2w[:, :3, 3].double().cpu() - truth.c2w[:, :3, 3].double().cpu()).norm(dim=-1)
    return angles * (180 / math.pi), away


def _axes(cameras: Cameras) -> Tensor:
    return cameras.c2w[:, :3, :3].double().cpu()


def _centred(cameras: Cameras) -> tuple[Tensor, Tensor]:
    """Returns positions relative to their mean, and that mean; float64, on the CPU."""
    positions = cameras.c2w[:, :3, 3].double().cpu()
    middle = positions.mean(dim=0)
    return positions - middle, middle
