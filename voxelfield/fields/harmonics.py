"""View-dependent colours as spherical harmonics, fitted by least squares to the colours that cameras see."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.decoders import Decoder, spherical_harmonics

DEGREE = 3
BASES = (DEGREE + 1) ** 2

# Penalties on the coefficients of bands 0 to 3, relative to the sum of weights; the squares of harmonics have a mean of
# 0.08.
_SMOOTHNESS = (1e-6, 0.017, 0.05, 0.1)


def fit_harmonics(squares: Tensor, colors: Tensor, weights: Tensor) -> Tensor:
    """Fits spherical harmonics of degree 3 to colours, by regularised least squares.

    Args:
        squares: (N, 136) weighted sums of :func:`products` of the harmonics with themselves.
        colors: (N, 16, 3) weighted sums of the harmonics times colours.
        weights: (N,) sums of the weights.

    Returns:
        The coefficients (N, 16, 3).
    """
    smooth = torch.cat([weights.new_full((2 * band + 1,), each) for band, each in enumerate(_SMOOTHNESS)])
    return torch.linalg.solve(symmetric(squares, BASES) + weights[:, None, None] * smooth.diag(), colors)


def products(first: Tensor, second: Tensor) -> Tensor:
    """Returns the upper triangles, row by row, of the outer products of rows (M, n) and (M, n)."""
    row, column = torch.triu_indices(first.shape[1], first.shape[1], device=first.device)
    return first[:, row] * second[:, column]


def symmetric(upper: Tensor, size: int) -> Tensor:
    """Returns the symmetric matrices (N, size, size) of upper triangles, row by row."""
    matrices = upper.new_empty(len(upper), size, size)
    row, column = torch.triu_indices(size, size, device=upper.device)
    matrices[:, row, column] = upper
    matrices[:, column, row] = upper
    return matrices


class HarmonicsDecoder(Decoder):
    """Another decoder whose colours are sums of a few functions of the direction, so that they can be shaded deferred.

    A sample emits the mean of its colours in some directions, and the 13 principal components of their differences from
    this mean. The functions are spherical harmonics, fitted to the components. As both are linear in the colours, their
    means along a ray give the same colour as the samples' colours.

    Args:
        decoder: The decoder.
        directions: (K, 3) unit viewing directions, at least five.
        weights: (K,) how much each of them counts; their sum is 1.
        features: (M, channels) of points from whose colours the components are found.
        importance: (M,) how much each of the points counts.
        inputs: The further inputs of the decoder for these points.

    Attributes:
        emitted: Number of values that a sample emits besides its density.
        basis: (13, 3, 16) the coefficients of the functions.
    """

    emitted = 16

    def __init__(
        self,
        decoder: Decoder,
        directions: Tensor,
        weights: Tensor,
        features: Tensor,
        importance: Tensor,
        **inputs: Tensor,
    ) -> None:
        super().__init__()
        self.channels = decoder.channels
        self.extra_inputs, self.density_inputs = decoder.extra_inputs, decoder.density_inputs
        self.decoder, self.directions, self.weights = decoder, directions, weights
        *_, differences = self._colors(features, inputs)
        scaled = (differences * weights.sqrt()[:, None]).flatten(1).double()
        covariance = (importance[:, None] * scaled).T @ scaled
        components = torch.linalg.eigh(covariance)[1][:, 3 - self.emitted :].float().unflatten(0, (len(weights), 3))
        self.factors = components * weights.sqrt()[:, None, None]
        shapes = components / weights.sqrt()[:, None, None]
        harmonics = spherical_harmonics(directions, DEGREE)
        squares = (weights[:, None] * products(harmonics, harmonics)).sum(dim=0, keepdim=True)
        fitted = torch.einsum("kb,kcj->jbc", weights[:, None] * harmonics, shapes)
        many = len(fitted)
        self.basis = fit_harmonics(squares.expand(many, -1), fitted, weights.new_ones(many)).mT.contiguous()

    def density(self, features: Tensor, **inputs: Tensor) -> Tensor:
        """See :class:`Decoder`."""
        return self.decoder.density(features, **inputs)

    def forward(
        self, features: Tensor, directions: Tensor, ray_index: Tensor, **inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`: returns density (M,), and mean colours and components (M, 16)."""
        density, mean, differences = self._colors(features, inputs)
        return density, torch.cat((mean, differences.flatten(1) @ self.factors.flatten(0, 1)), dim=1)

    def shade(self, features: Tensor, directions: Tensor, count: Tensor | None = None) -> Tensor:
        """See :class:`voxelfield.fields.field.Field`."""
        mean, components = features.split((3, self.emitted - 3), dim=1)
        return mean + torch.einsum("rj,jck,rk->rc", components, self.basis, spherical_harmonics(directions, DEGREE))

    def _colors(self, features: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns densities (M,), mean colours (M, 3), and the differences (M, K, 3) of the colours from them."""
        ray, colors = features.new_zeros(len(features), dtype=torch.int64), []
        for direction in self.directions:
            density, rgb = self.decoder(features, direction[None], ray, **inputs)
            if self.decoder.shade is not None:
                rgb = self.decoder.shade(rgb, direction.expand_as(features[:, :3]))
            colors.append(rgb)
        stacked = torch.stack(colors, dim=1)
        mean = (self.weights[:, None] * stacked).sum(dim=1)
        return density, mean, stacked - mean[:, None]


def common_directions(directions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Groups unit directions by k-means on the sphere (Dhillon and Modha 2001).

    Args:
        directions: (M, 3), at least one.
        count: Largest number of groups.

    Returns:
        The mean unit directions (K, 3) of groups that are not empty, and their fractions (K,) of all directions.
    """
    means = directions[torch.linspace(0, len(directions) - 1, count, device=directions.device).long()]
    for _ in range(20):
        groups = F.one_hot((directions @ means.T).argmax(dim=1), len(means)).to(directions.dtype)
        means = F.normalize((groups.T @ directions)[groups.any(dim=0)], dim=1)
    groups = F.one_hot((directions @ means.T).argmax(dim=1), len(means)).to(directions.dtype).mean(dim=0)
    return means[groups > 0], groups[groups > 0]
