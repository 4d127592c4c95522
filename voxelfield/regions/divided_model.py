"""The trained models of the regions of a capture, rendered as one field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.regions.division import REGIONS, Division
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import ViewRenderer
from voxelfield.training.trained_model import TrainedModel


@dataclass(frozen=True, eq=False, repr=False)
class DividedModel(TrainedModel):
    """The trained models of the regions of a capture.

    It renders and evaluates as one field (:meth:`voxelfield.regions.division.Division.weights`). What needs a single
    field, such as :meth:`density` and an export, raises ValueError; each of :attr:`parts` has one.

    Attributes:
        model: The model of a region, which stands for all of them where they do not differ.
        config: The settings of that region, for the whole capture.
        steps: Number of training steps of all regions together.
        division: The regions.
        regions: Their models, on the same device.
    """

    _: KW_ONLY
    division: Division
    regions: tuple[TrainedModel, ...]

    @classmethod
    def of(cls, division: Division, regions: Sequence[TrainedModel]) -> DividedModel:
        """Returns the model of a division.

        Args:
            division: The division.
            regions: The model of each region, on the same device.
        """
        first = regions[0]
        scene = replace(first.config.scene, region=None, aabb=None)
        config, steps = replace(first.config, scene=scene), sum(region.steps for region in regions)
        return cls(first.model, config, steps, division=division, regions=tuple(regions))

    @property
    def field(self) -> RadianceField:
        """There is none.

        Raises:
            ValueError: Always; the message names the regions.
        """
        return self._refuse()

    @property
    def occupancy(self) -> OccupancyGrid:
        """There are none; raises as :attr:`field` does."""
        return self._refuse()

    @property
    def parts(self) -> tuple[TrainedModel, ...]:
        """See :class:`TrainedModel`."""
        return self.regions

    @property
    def centre(self) -> Tensor:
        """See :class:`TrainedModel`."""
        return torch.stack([region.centre for region in self.regions]).mean(dim=0)

    def part_at(self, position: Tensor) -> TrainedModel:
        """See :class:`TrainedModel`."""
        return self.regions[int(self.division.weights(position[None]).argmax())]

    def with_parts(self, change: Callable[[TrainedModel], TrainedModel]) -> TrainedModel:
        """See :class:`TrainedModel`."""
        return DividedModel.of(self.division, [change(region) for region in self.regions])

    def renderer(
        self, backend: str | None = None, *, supersampling: int | None = None, background: Tensor | None = None
    ) -> ViewRenderer:
        """See :class:`TrainedModel`."""
        return BlendedRenderer(
            self.division,
            [region.renderer(backend, supersampling=supersampling, background=background) for region in self.regions],
        )

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"RUN must be a run with one field, such as that of a region, {REGIONS}/0, got one of {len(self.regions)} "
            "regions"
        )


class BlendedRenderer:
    """Renders the regions of a capture as one field, each camera's image by the regions that reach it.

    Args:
        division: The regions.
        renderers: The renderer of each region, on the same device.

    Attributes:
        backend: Names of the backends of the regions.
        device: Device of the fields.
    """

    def __init__(self, division: Division, renderers: Sequence[ViewRenderer]) -> None:
        self.backend = ", ".join(dict.fromkeys(renderer.backend for renderer in renderers))
        self.device = renderers[0].device
        self._division, self._renderers = division, renderers
        self._cameras: Cameras | None = None
        self._weights: list[list[float]] = []

    def view(self, cameras: Cameras, index: int) -> View:
        """See :meth:`voxelfield.FieldRenderer.view`. Synchronises once for each set of cameras."""
        if cameras is not self._cameras:
            positions = cameras.c2w[:, :3, 3].cpu().double()
            self._cameras, self._weights = cameras, self._division.weights(positions).tolist()
        cameras = cameras.to(self.device)
        shares = zip(self._weights[index], self._renderers, strict=True)
        views = [(weight, renderer.view(cameras, index)) for weight, renderer in shares if weight > 0]
        if len(views) == 1:
            return views[0][1]
        rgb = torch.stack([weight * view.rgb for weight, view in views]).sum(dim=0)
        opacity = torch.stack([weight * view.opacity for weight, view in views]).sum(dim=0)
        depth = torch.stack([weight * view.opacity * view.depth for weight, view in views]).sum(dim=0)
        return View(rgb, opacity, depth / opacity.clamp(min=1e-6))
