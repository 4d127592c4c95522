"""Decoders, which map interpolated features to density and colour: spherical harmonics or a shallow network."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from voxelfield import ops
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.foundation import constants
from voxelfield.foundation.checks import check_at_least_one, check_degree
from voxelfield.ops._internal.color import append_view


def spherical_harmonics(directions: Tensor, degree: int) -> Tensor:
    """Evaluates the real spherical harmonics basis.

    Orthonormal over the sphere, with the Condon-Shortley phase, in the order l = 0..degree, m = -l..l (Sloan 2008,
    appendix A2; the convention of Plenoxels and of 3D Gaussian Splatting).

    Args:
        directions: (..., 3) floating point, unit length, world frame.
        degree: Highest band, 0 to 3.

    Returns:
        (..., (degree + 1)**2) in the dtype of ``directions``; differentiable.

    Raises:
        ValueError: ``degree`` is outside 0..3, or the last dimension is not 3.
    """
    check_degree("degree", degree)
    if directions.shape[-1] != 3:
        raise ValueError(f"directions must have shape (..., 3), got {tuple(directions.shape)}")
    x, y, z = directions.unbind(-1)
    bands = [torch.full_like(x, 0.5 / math.sqrt(math.pi))]
    if degree >= 1:
        c = math.sqrt(3 / (4 * math.pi))
        bands += [-c * y, c * z, -c * x]
    if degree >= 2:
        xx, yy, zz = x * x, y * y, z * z
        c = 0.5 * math.sqrt(15 / math.pi)
        bands += [
            c * x * y,
            -c * y * z,
            0.25 * math.sqrt(5 / math.pi) * (3 * zz - 1),
            -c * x * z,
            0.5 * c * (xx - yy),
        ]
    if degree >= 3:
        c0, c1, c2 = math.sqrt(35 / (2 * math.pi)) / 4, math.sqrt(105 / math.pi) / 2, math.sqrt(21 / (2 * math.pi)) / 4
        bands += [
            -c0 * y * (3 * xx - yy),
            c1 * x * y * z,
            -c2 * y * (5 * zz - 1),
            math.sqrt(7 / math.pi) / 4 * z * (5 * zz - 3),
            -c2 * x * (5 * zz - 1),
            c1 / 2 * z * (xx - yy),
            -c0 * x * (xx - 3 * yy),
        ]
    return torch.stack(bands, dim=-1)


class Decoder(nn.Module):
    """The base class of decoders: :attr:`channels`, :meth:`density` and the call, and what a decoder may state besides.

    Attributes:
        channels: Number of input features; a subclass must set it.
        view_channels: Indices of the features that only describe view dependence: if they were zero, the colour would
            be the same from all directions. They are poorly constrained by few views, so training may give them a lower
            learning rate.
        density_is_monotonic: Whether the density is a monotonic function of a single feature, so that inside a voxel of
            a grid it never exceeds the highest density at the voxel's vertices. Training then finds occupied space by
            evaluating vertices only. If it is False, training evaluates random points between the vertices; this is
            needed, for example, for the density of a signed distance, which peaks between vertices. Subclasses inherit
            the attribute, so a subclass that overrides the density must also override it.
        extra_inputs: Names of further inputs, which the call takes as keyword arguments: ``"position"``, (M, 3) the
            positions at which the grid is read (in warped coordinates if the field has a warp), and names of
            :attr:`voxelfield.Rays.values`, (R, ...) for ``ray_index`` to select from, such as ``"time"`` or
            ``"image"``, the index of the training image.
        optional_inputs: Inputs that are left out if rays do not have them. The decoder then uses the argument's
            default, such as None for "the mean of all images".
        density_inputs: Inputs that :meth:`density` takes as keyword arguments too, (M, ...) there, one row for each
            sample. Values of rays must have a default, because the density is also evaluated away from rays, to find
            occupied space: at a random time, for example, so that the cells of all times are found.
        shade: A method for deferred shading, see :class:`voxelfield.fields.field.Field`, or None. The call then returns
            features (M, C) in place of rgb.
    """

    channels: int
    view_channels: tuple[int, ...] = ()
    density_is_monotonic: bool = False
    extra_inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    density_inputs: tuple[str, ...] = ()
    shade: Callable[..., Tensor] | None = None

    def density(self, features: Tensor) -> Tensor:
        """Maps features (M, channels) to densities (M,)."""
        raise NotImplementedError(f"{type(self).__name__} must define density")

    def forward(self, features: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        """Maps features (M, channels) and the directions ``directions[ray_index]`` to densities and colours.

        Args:
            features: (M, channels) of M samples.
            directions: (R, 3) unit viewing directions of R rays, world frame.
            ray_index: (M,) int64, the ray of each sample.

        Returns:
            density (M,), per world unit, and rgb (M, 3) in [0, 1]; float32.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")


class _DensityFirstDecoder(Decoder, ABC):
    """Computes the density from the first feature alone, and the colour from the others and the viewing direction.

    Args:
        view_degree: Degree of the spherical harmonics that encode the direction, 0 to 3.
        density: Maps the first feature to the density.
    """

    def __init__(self, view_degree: int, density: DensityActivation) -> None:
        super().__init__()
        self.view_degree = view_degree
        self.activation = density
        # Of any other module, nothing is known.
        self.density_is_monotonic = isinstance(density, DensityActivation) and density.is_monotonic

    def density(self, features: Tensor) -> Tensor:
        """See :class:`Decoder`."""
        return self.activation(features[..., 0])

    def encode_view(self, directions: Tensor) -> Tensor:
        """Maps unit viewing directions (R, 3) to spherical harmonics (R, K); called per ray, not per sample."""
        return spherical_harmonics(directions, self.view_degree)

    def forward(self, features: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`."""
        return self.density(features), self.rgb(features, self.encode_view(directions)[ray_index])

    @abstractmethod
    def rgb(self, features: Tensor, view: Tensor) -> Tensor:
        """Maps features (M, channels) and encoded directions (M, K) to colours (M, 3) in [0, 1], float32."""


class SHDecoder(_DensityFirstDecoder):
    """View-dependent colour as spherical harmonics whose coefficients are the features.

    As in Plenoxels (Fridovich-Keil et al. 2022).

    Channels: raw density, then the coefficients of all basis functions for red, for green and for blue. No parameters.

    Args:
        degree: SH degree, 0 to 3.
        density: Settings of :class:`DensityActivation`.
    """

    def __init__(self, degree: int, density: DensityActivation) -> None:
        check_degree("degree", degree)
        super().__init__(degree, density)
        self.degree = degree
        bases = (degree + 1) ** 2
        self.channels = 1 + 3 * bases
        self.view_channels = tuple(1 + color * bases + basis for color in range(3) for basis in range(1, bases))

    def rgb(self, features: Tensor, view: Tensor) -> Tensor:
        """Maps features (M, channels) and encoded directions (M, K) to colours (M, 3) in [0, 1], by a sigmoid."""
        coefficients = features[:, 1:].float().unflatten(-1, (3, (self.degree + 1) ** 2))
        return torch.sigmoid((coefficients * view[:, None]).sum(-1))


class ColorMLPDecoder(_DensityFirstDecoder):
    """View-dependent colour, computed from the features and the viewing direction by a shallow network.

    The direction is encoded by its spherical harmonics, as in Instant-NGP (Mueller et al. 2022); the features are fed
    to the network directly, as in DirectVoxGO (section 5.2).

    Args:
        features: Number of colour features, in addition to the density channel.
        width: Width of the hidden layers.
        hidden: Number of hidden layers.
        view_degree: SH degree of the direction's encoding, 0 to 3.
        density: Settings of :class:`DensityActivation`.
    """

    def __init__(self, features: int, width: int, hidden: int, view_degree: int, density: DensityActivation) -> None:
        check_degree("view_degree", view_degree)
        super().__init__(view_degree, density)
        for name, value in (("features", features), ("width", width), ("hidden", hidden)):
            check_at_least_one(name, value)
        self.channels = 1 + features
        widths = [features + (view_degree + 1) ** 2, *([width] * hidden)]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU(inplace=True)]
        output = nn.Linear(width, 3)
        nn.init.zeros_(output.bias)
        self.network = nn.Sequential(*layers, output)

    def rgb(self, features: Tensor, view: Tensor) -> Tensor:
        """Maps features (M, channels) and encoded directions (M, K) to colours (M, 3).

        Runs in the autocast dtype, if autocast is enabled, up to the sigmoid.
        """
        dtype = next(self.network.parameters()).dtype  # may differ from the grid's
        inputs = torch.cat((features[:, 1:].to(dtype), view.to(dtype)), dim=-1)
        return torch.sigmoid(self.network(inputs).float())


class LayerWeights(nn.ParameterList):
    """The matrices (out, in) between the layers of a network without biases, as :func:`voxelfield.ops.mlp` takes them.

    Initialised as in Glorot and Bengio 2010. A session updates them as ``optimizer.matrices`` says, like the weights of
    ``nn.Linear``; it does not recognise matrices in other containers.

    Args:
        widths: Number of values before the first layer, and of those after each.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__(nn.Parameter(torch.empty(fan_out, fan_in)) for fan_in, fan_out in pairwise(widths))
        for matrix in self:
            nn.init.xavier_uniform_(matrix)


class FusedMLPDecoder(Decoder):
    """Density and view-dependent colour by two shallow networks, as in Instant-NGP (Mueller et al. 2022, section 4.1).

    The first network maps features to ``geometry`` numbers, the first of which becomes the density; the second maps
    these numbers and the spherical harmonics of the viewing direction to colour. Both networks have no biases and run
    fused (:func:`voxelfield.ops.mlp`): in float16 on CUDA, in the dtype of the features on the CPU. Their weights are
    float32.

    Args:
        channels: Number of input features.
        width: Width of the hidden layers.
        geometry: Number of outputs of the first network, at least 1.
        hidden: Hidden layers of the second network; the first has one.
        view_degree: SH degree of the direction's encoding, 0 to 3.
        density: Maps the first network's first output to density.

    Raises:
        ValueError: A number is below 1, ``view_degree`` is outside 0..3, or a layer is wider than the fused networks
            support.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        geometry: int,
        hidden: int,
        view_degree: int,
        density: DensityActivation | ExponentialDensity,
    ) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("width", width), ("geometry", geometry), ("hidden", hidden)):
            check_at_least_one(name, value)
        check_degree("view_degree", view_degree)
        inputs = self._color_inputs(geometry) + (view_degree + 1) ** 2
        for name, size in (("channels", channels), ("width", width), ("geometry and view_degree", inputs)):
            if size > constants.MAX_WIDTH:
                raise ValueError(
                    f"{name} must come to at most {constants.MAX_WIDTH} numbers for the fused networks, got {size}"
                )
        self.channels = channels
        self.view_degree = view_degree
        self.activation = density
        self.density_network = LayerWeights(channels, width, geometry)
        self.color_network = LayerWeights(inputs, *([width] * hidden), 3)

    def density(self, features: Tensor) -> Tensor:
        """See :class:`Decoder`."""
        return self.activation(self._geometry(features)[:, 0])

    def forward(self, features: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`."""
        inputs, raw = self._append_view(self._geometry(features), directions, ray_index)
        return self.activation(raw), torch.sigmoid(ops.mlp(inputs, list(self.color_network)).float())

    def _color_inputs(self, geometry: int) -> int:
        """Returns how many of the first network's outputs the second reads."""
        return geometry

    def _geometry(self, features: Tensor) -> Tensor:
        return ops.mlp(features.half() if features.is_cuda else features, list(self.density_network))

    def _append_view(self, geometry: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the colour network's inputs, and the first column of ``geometry`` in the dtype of ``directions``."""
        if directions.requires_grad:
            # The kernel does not compute a gradient with respect to directions.
            view = spherical_harmonics(directions, self.view_degree).index_select(0, ray_index)
            return torch.cat((geometry, view.to(geometry.dtype)), dim=1), geometry[:, 0].to(directions.dtype)
        return append_view(geometry, directions, ray_index, self.view_degree)


class DeferredMLPDecoder(FusedMLPDecoder):
    """The two networks of a :class:`FusedMLPDecoder`, the second of which runs once per ray instead of per sample.

    Deferred shading, as in SNeRG (Hedman et al. 2021) and MERF (Reiser et al. 2023). The first network outputs raw
    density, diffuse colour, mapped to [0, 1] by a sigmoid, and features as they are. The second maps their means along
    a ray, and the spherical harmonics of the ray's direction, to a difference from the diffuse colour, which has either
    sign and no limits, so colours may leave [0, 1].

    The arguments are those of :class:`FusedMLPDecoder`, but ``geometry`` is at least 4: density, diffuse colour, and
    any features.
    """

    def _color_inputs(self, geometry: int) -> int:
        check_deferred_geometry("geometry", geometry)
        return geometry - 1

    @property
    def emitted(self) -> int:
        """Number of values that a sample emits besides its density: a diffuse colour and features."""
        return self.density_network[-1].shape[0] - 1

    def forward(self, features: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Decoder`: returns density (M,), and diffuse colours and features (M, geometry - 1)."""
        geometry = self._geometry(features)
        raw, diffuse, others = geometry.float().split((1, 3, geometry.shape[1] - 4), dim=1)
        return self.activation(raw[:, 0]), torch.cat((torch.sigmoid(diffuse), others), dim=1)

    def shade(self, features: Tensor, directions: Tensor, count: Tensor | None = None) -> Tensor:
        """See :class:`voxelfield.fields.field.Field`."""
        rays = torch.arange(len(features), device=features.device)
        inputs, _ = self._append_view(features.half() if features.is_cuda else features, directions, rays)
        return features[:, :3] + ops.mlp(inputs, list(self.color_network), count=count).to(features.dtype)


def check_deferred_geometry(name: str, geometry: int) -> None:
    """Raises ValueError unless the first network of a :class:`DeferredMLPDecoder` can have that many outputs."""
    if geometry < 4:
        raise ValueError(f"{name} must be at least 4 for deferred shading, density and diffuse colour, got {geometry}")
