"""The division of a capture into overlapping regions by the positions of its cameras."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.config.parsing import parse
from voxelfield.files import atomic_write, read_regular
from voxelfield.training.config.run import Corner
from voxelfield.warps.bounds import stray_cameras

REGIONS = "regions"
"""Name of the folder of a run's regions, each of which is a run of its own: ``regions/0``, ``regions/1``, ..."""

FILE = f"{REGIONS}.json"
"""Name of the record of a division, beside that folder."""


@dataclass(frozen=True)
class Cut:
    """A cut between two parts of a capture, across an axis, and the overlap of the parts around it.

    Attributes:
        axis: 0, 1 or 2 for x, y or z.
        low: Where the overlap begins, world units.
        high: Where it ends.
        below: The cut of the part that reaches up to ``high``; None if it is one region.
        above: The cut of the part that begins at ``low``, likewise.
    """

    axis: int
    low: float
    high: float
    below: Cut | None = None
    above: Cut | None = None

    def regions(self, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, for each region, its weights (N,) at positions (N, 3) and whether it contains them, (N,) bool."""
        along = positions[:, self.axis]
        share = ((along - self.low) / max(self.high - self.low, 1e-30)).clamp(0, 1)
        share = share * share * (3 - 2 * share)
        for part, weight, inside in (
            (self.below, 1 - share, along <= self.high),
            (self.above, share, along >= self.low),
        ):
            inner = [(torch.ones_like(weight), torch.ones_like(inside))] if part is None else part.regions(positions)
            for inner_weight, inner_inside in inner:
                yield weight * inner_weight, inside & inner_inside


@dataclass(frozen=True)
class Division:
    """Overlapping regions of a capture, numbered from 0.

    Attributes:
        cut: The first cut, within whose parts the others lie, as in a k-d tree.
        boxes: The boxes around the cameras of each region, overlaps included, world units.
    """

    cut: Cut
    boxes: list[tuple[Corner, Corner]]

    def weights(self, positions: Tensor) -> Tensor:
        """Returns the shares of the regions in the pictures of cameras.

        A picture is the weighted mean of those of the regions: Block-NeRF (Tancik et al. 2022, section 3.3.2) blends
        whole pictures, too, by the distances of the camera from the regions' centres. No seam can then appear within a
        picture, and each region is seen from where its own photographs were taken. Compositing the regions along the
        rays instead (Turki et al. 2022, Mega-NeRF) would show them from elsewhere, and each of these fields paints what
        lies behind its region onto boxes of its own. Block-NeRF's weights never vanish, so its regions appear and
        disappear at a distance; these are 1 and 0 outside the overlaps, and change smoothly within, where both regions
        were trained.

        Args:
            positions: (N, 3) positions of cameras, world units, anywhere.

        Returns:
            (N, K), in [0, 1]; each row adds up to 1, and most of its values are 0.
        """
        return torch.stack([weight for weight, _ in self.cut.regions(positions)], dim=-1)

    def write(self, directory: Path) -> None:
        """Writes the record of the division into the directory of a run."""
        with atomic_write(directory / FILE) as file:
            file.write((json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, directory: Path) -> Division:
        """Reads the record in the directory of a run.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is damaged.
        """
        path = directory / FILE
        try:
            division = parse(cls, json.loads(read_regular(path)))
            count = sum(1 for _ in division.cut.regions(torch.zeros(0, 3)))
            if count != len(division.boxes):
                raise ValueError(f"boxes must be {count}, one for each region, got {len(division.boxes)}")
        except (ValueError, IndexError, RecursionError) as error:
            raise ValueError(f"{path} must be the record of a division into regions ({error})") from error
        return division


def divide(c2w: Tensor, count: int, overlap: float) -> Division:
    """Divides a capture into regions with equally many cameras, as a k-d tree does.

    A part is cut across the axis along which its cameras extend farthest, so that the numbers of cameras on both sides
    are in proportion to the numbers of regions there. Cameras astray do not determine the axis.

    Args:
        c2w: (N, 4, 4) camera to world of all photographs, in any order.
        count: Number of regions, at least 2.
        overlap: Cameras of its neighbour that a region also has at each side of a cut, as a share of its own.

    Raises:
        ValueError: There are fewer than two cameras for each region, or too few different positions.
    """
    if len(c2w) < 2 * count:
        raise ValueError(f"regions must be at most {len(c2w) // 2} for {len(c2w)} photographs, got {count}")
    positions = c2w[:, :3, 3].double()
    cut = _cut(c2w, count, overlap)
    boxes = []
    for _, inside in cut.regions(positions):
        low, high = positions[inside].aminmax(dim=0)
        boxes.append((tuple(low.tolist()), tuple(high.tolist())))
    return Division(cut, boxes)


def _cut(c2w: Tensor, count: int, overlap: float) -> Cut:
    positions = c2w[:, :3, 3].double()
    low, high = positions[~stray_cameras(c2w)].aminmax(dim=0)
    axis = int((high - low).argmax())
    along, order = positions[:, axis].sort(stable=True)
    if float(along[0]) == float(along[-1]):
        raise ValueError(
            f"regions must be fewer, or 1, because {len(c2w)} photographs, which were to be divided into {count} "
            f"regions, were taken from one position, {positions[0].tolist()}"
        )
    half = count // 2
    middle = round(len(along) * half / count)
    spare = max(1, round(overlap * len(along) / count))
    parts = (half, order[:middle]), (count - half, order[middle:])
    below, above = (None if regions == 1 else _cut(c2w[part], regions, overlap) for regions, part in parts)
    first, last = max(middle - spare, 0), min(middle + spare, len(along)) - 1
    return Cut(axis, float(along[first]), float(along[last]), below, above)
