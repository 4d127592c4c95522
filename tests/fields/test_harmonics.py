"""Colours as means and components of their differences by direction."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from voxelfield.fields.decoders import SHDecoder, spherical_harmonics
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.harmonics import HarmonicsDecoder, common_directions, fit_harmonics, products


class Linear(SHDecoder):
    """Harmonics without the sigmoid, so that a colour is linear in its features."""

    def rgb(self, features, view):
        """See :class:`SHDecoder`."""
        return (features[:, 1:].unflatten(-1, (3, -1)) * view[:, None]).sum(-1)


def directions(count: int) -> torch.Tensor:
    return F.normalize(torch.randn(count, 3), dim=-1)


def test_colors_linear_in_few_functions_are_kept():
    decoder = Linear(1, DensityActivation(1.0, 1.0))
    features = torch.randn(500, decoder.channels)
    own = HarmonicsDecoder(decoder, directions(60), torch.full((60,), 1 / 60), features, torch.ones(500))
    density, emitted = own(features, directions(1), torch.zeros(500, dtype=torch.long))
    assert emitted.shape == (500, own.emitted)
    seen = directions(500)
    assert torch.equal(density, decoder.density(features))
    expected = decoder(features, seen, torch.arange(500))[1]
    spread = expected.std()
    # The nine coefficients fit into 13 components. What remains is the penalty on the harmonics.
    assert (own.shade(emitted, seen) - expected).square().mean().sqrt() < 0.25 * spread
    assert (emitted[:, :3] - expected).square().mean().sqrt() > 0.5 * spread, "colours hardly depend on the direction"


def test_harmonics_are_fitted_to_colors():
    truth, seen = torch.randn(2, 16, 3), directions(400)
    basis = spherical_harmonics(seen, 3)
    squares = products(basis, basis).sum(dim=0).expand(2, -1)
    colors = torch.einsum("db,dk,nkc->nbc", basis, basis, truth)
    fitted = fit_harmonics(squares, colors, torch.full((2,), 1e-3))
    assert torch.allclose(fitted, truth, atol=1e-3)


@pytest.mark.parametrize("count", [1, 6])
def test_common_directions_are_those_of_groups(count):
    centres = torch.cat((torch.eye(3), -torch.eye(3)))[:count]
    given = F.normalize(centres.repeat_interleave(20, dim=0) + 0.05 * torch.randn(20 * count, 3), dim=-1)
    means, fractions = common_directions(given, count)
    assert torch.allclose(means, centres, atol=0.1)
    assert torch.allclose(fractions, torch.full((count,), 1 / count))
