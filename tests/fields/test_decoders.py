"""Spherical harmonics, the density activations and the decoders."""

from __future__ import annotations

import math

import pytest
import torch

from voxelfield.fields.decoders import ColorMLPDecoder, FusedMLPDecoder, SHDecoder, spherical_harmonics
from voxelfield.fields.density import DensityActivation, ExponentialDensity

DEGREES = [0, 1, 2, 3]
SCALE, INITIAL = 25.0, 0.1


def density():
    return DensityActivation(scale=SCALE, initial=INITIAL)


def unit_directions(count, dtype=torch.float32, device="cpu"):
    return torch.nn.functional.normalize(torch.randn(count, 3, dtype=torch.float64), dim=-1).to(device, dtype)


def legendre(band, order, x):
    """Associated Legendre function with the Condon-Shortley phase, by the recurrence in the band."""
    value = (-1) ** order * math.prod(range(1, 2 * order, 2)) * (1 - x * x) ** (order / 2)
    previous = torch.zeros_like(x)
    for n in range(order + 1, band + 1):
        value, previous = ((2 * n - 1) * x * value - (n + order - 1) * previous) / (n - order), value
    return value


def harmonics(directions, degree):
    """The same basis in spherical coordinates: normalised Legendre functions of the height, waves of the azimuth."""
    x, y, z = directions.unbind(-1)
    azimuth = torch.atan2(y, x)
    basis = []
    for band in range(degree + 1):
        for m in range(-band, band + 1):
            order = abs(m)
            norm = math.sqrt(
                (2 * band + 1) / (4 * math.pi) * math.factorial(band - order) / math.factorial(band + order)
            )
            wave = torch.sin(order * azimuth) if m < 0 else torch.cos(order * azimuth)
            basis.append((math.sqrt(2) if m else 1) * norm * wave * legendre(band, order, z))
    return torch.stack(basis, dim=-1)


def sphere_quadrature(bands):
    """Directions and weights that integrate products of two harmonics below a band exactly."""
    index = torch.arange(1, bands, dtype=torch.float64)
    off_diagonal = index / torch.sqrt(4 * index * index - 1)
    # Golub and Welsch (1969): Gauss-Legendre nodes and weights are eigenvalues and eigenvectors of this matrix.
    nodes, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    azimuth = torch.arange(2 * bands, dtype=torch.float64) * math.pi / bands
    z, a = torch.meshgrid(nodes, azimuth, indexing="ij")
    radius = torch.sqrt(1 - z * z)
    directions = torch.stack((radius * a.cos(), radius * a.sin(), z), dim=-1).flatten(0, 1)
    weights = (2 * vectors[0].square())[:, None].expand_as(z).flatten() * math.pi / bands
    return directions, weights


# --- spherical harmonics


@pytest.mark.parametrize("degree", DEGREES)
def test_harmonics_are_orthonormal_over_the_sphere(degree):
    directions, weights = sphere_quadrature(degree + 2)
    assert weights.sum().item() == pytest.approx(4 * math.pi)
    basis = spherical_harmonics(directions, degree)
    gram = basis.T @ (weights[:, None] * basis)
    torch.testing.assert_close(gram, torch.eye((degree + 1) ** 2, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_harmonics_have_the_documented_order_and_signs(device, degree, dtype):
    directions = unit_directions(200, torch.float64)
    basis = spherical_harmonics(directions.to(device, dtype), degree)
    assert basis.shape == (200, (degree + 1) ** 2)
    assert basis.dtype == dtype
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(basis.cpu().double(), harmonics(directions, degree), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 5, 3)], ids=str)
def test_harmonics_keep_leading_dimensions(shape):
    directions = torch.randn(shape)
    basis = spherical_harmonics(directions, 2)
    assert basis.shape == (*shape[:-1], 9)
    torch.testing.assert_close(basis.reshape(-1, 9), spherical_harmonics(directions.reshape(-1, 3), 2))


# --- density


@pytest.mark.parametrize("initial", [1e-6, 0.1, 30.0])
@pytest.mark.parametrize("scale", [0.5, 25.0])
def test_zero_feature_has_the_initial_density(device, scale, initial):
    value = DensityActivation(scale, initial)(torch.zeros(4, 2, device=device))
    assert value.shape == (4, 2)
    torch.testing.assert_close(value, torch.full_like(value, initial), rtol=1e-5, atol=0)


def test_density_is_a_softplus(device):
    raw = torch.linspace(-30, 30, 301, dtype=torch.float64)
    shift = math.log(math.expm1(INITIAL / SCALE))
    expected = SCALE * torch.log1p(torch.exp(raw + shift))
    torch.testing.assert_close(density()(raw.to(device)).cpu().double(), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("raw", [1e4, 1e30, -1e4, -1e30])
def test_density_of_large_features_is_finite(device, raw):
    x = torch.tensor(raw, device=device, requires_grad=True)
    value = density()(x)
    value.backward()
    expected = SCALE * raw if raw > 0 else 0.0
    assert value.item() == pytest.approx(expected, rel=1e-3)
    assert x.grad.item() == pytest.approx(SCALE if raw > 0 else 0.0)


@pytest.mark.parametrize("initial", [1e-6, 1.0, 30.0])
def test_exponential_density(device, initial):
    raw = torch.linspace(-40, 12, 53, dtype=torch.float64)
    value = ExponentialDensity(initial)(raw.to(device))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.cpu().double(), initial * raw.exp(), rtol=1e-5, atol=0)
    assert ExponentialDensity(initial)(torch.zeros(2, 3, device=device)).tolist() == [[pytest.approx(initial)] * 3] * 2


def test_exponential_density_has_itself_as_gradient_within_bounds(device):
    raw = torch.tensor([-50.0, -1.0, 0.0, 5.0, 13.0, 1e30], device=device, requires_grad=True)
    value = ExponentialDensity(2.0)(raw)
    value.sum().backward()
    assert value.isfinite().all()
    # beyond the bound the density grows no more, but can still be lowered
    torch.testing.assert_close(raw.grad, value.detach())
    assert raw.grad[4:].tolist() == [pytest.approx(2 * math.exp(12))] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_exponential_density_gives_back_the_gradients_dtype(dtype):
    raw = torch.tensor([-2.0, 0.5, 3.0], dtype=dtype, requires_grad=True)
    ExponentialDensity(1.0)(raw).sum().backward()
    assert raw.grad.dtype == dtype
    torch.testing.assert_close(raw.grad, raw.detach().exp(), rtol=1e-2, atol=0)


# --- decoders


def sh_decoder(degree=2):
    return SHDecoder(degree, density())


def mlp_decoder(**changes):
    settings = {"features": 6, "width": 16, "hidden": 2, "view_degree": 2, **changes}
    return ColorMLPDecoder(**settings, density=density())


DECODERS = pytest.mark.parametrize("make", [sh_decoder, mlp_decoder])


@DECODERS
@pytest.mark.parametrize("count", [0, 1, 17])
def test_decoders_give_densities_and_colours(device, make, count):
    decoder = make().to(device)
    features = (5 * torch.randn(count, decoder.channels)).to(device)
    view = decoder.encode_view(unit_directions(count, device=device))
    rgb = decoder.rgb(features, view)
    assert rgb.shape == (count, 3)
    assert rgb.dtype == torch.float32
    assert ((rgb >= 0) & (rgb <= 1)).all()
    assert torch.equal(decoder.density(features), decoder.activation(features[:, 0]))
    assert torch.equal(decoder.density(features[:, :1]), decoder.density(features))
    assert decoder.density(features[None, :, None]).shape == (1, count, 1)


@pytest.mark.parametrize("degree", DEGREES)
def test_sh_colour_is_the_sum_over_the_basis_per_channel(device, degree):
    decoder = sh_decoder(degree)
    features = torch.randn(9, decoder.channels, dtype=torch.float64)
    directions = unit_directions(9, torch.float64)
    size = (degree + 1) ** 2
    expected = torch.zeros(9, 3, dtype=torch.float64)
    for channel in range(3):
        coefficients = features[:, 1 + channel * size : 1 + (channel + 1) * size]
        expected[:, channel] = 1 / (1 + torch.exp(-(coefficients * harmonics(directions, degree)).sum(-1)))
    rgb = decoder.rgb(features.to(device).float(), decoder.encode_view(directions.to(device).float()))
    torch.testing.assert_close(rgb.cpu().double(), expected, rtol=0, atol=1e-6)


@DECODERS
def test_colour_depends_on_the_view_and_on_every_colour_channel_only(make):
    decoder = make()
    features = torch.randn(4, decoder.channels, requires_grad=True)
    view = decoder.encode_view(unit_directions(4)).requires_grad_()
    rgb = decoder.rgb(features, view)
    d_features, d_view = torch.autograd.grad(rgb.square().sum(), (features, view))
    assert not d_features[:, 0].any()
    assert d_features[:, 1:].any(dim=0).all()
    assert d_view.any(dim=0).all()


@pytest.mark.parametrize("degree", DEGREES)
def test_sh_colour_differs_by_direction_through_view_channels_alone(degree):
    decoder, directions = sh_decoder(degree), unit_directions(7)
    for channel in range(decoder.channels):
        features = torch.zeros(1, decoder.channels)
        features[0, channel] = 1.0
        rgb = decoder.rgb(features.expand(7, -1), decoder.encode_view(directions))
        assert bool((rgb != rgb[:1]).any()) == (channel in decoder.view_channels)


@DECODERS
def test_autocast_leaves_colours_and_densities_float32(device, make):
    decoder = make().to(device)
    features = torch.randn(50, decoder.channels).to(device)
    view = decoder.encode_view(unit_directions(50, device=device))
    exact = decoder.rgb(features, view)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        rgb, sigma = decoder.rgb(features, view), decoder.density(features)
        if make is mlp_decoder:
            assert decoder.network[0](features.new_zeros(1, 15)).dtype == torch.bfloat16
    assert rgb.dtype == sigma.dtype == torch.float32
    assert torch.equal(sigma, decoder.density(features))
    # bfloat16 carries 8 bits; values of order one pass through three layers, and the sigmoid shrinks errors by four.
    torch.testing.assert_close(rgb, exact, rtol=0, atol=0.02)


# --- the network


def network_decoder(**changes):
    settings = {"channels": 12, "width": 32, "geometry": 8, "hidden": 2, "view_degree": 2, **changes}
    return FusedMLPDecoder(**settings, density=ExponentialDensity(0.5))


def plain(features, directions, ray_index, first, second, degree):
    """The two networks as matrix products in float64; and how near to zero each row's nearest hidden unit comes.

    That is relative to the spread of its layer, before the ReLU.
    """
    nearest = []

    def layers(x, weights):
        *hidden, last = weights
        for weight in hidden:
            x = x @ weight.T
            nearest.append((x.abs() / x.std()).detach().amin(dim=1))
            x = torch.relu(x)
        return x @ last.T

    geometry = layers(features, first)
    view = harmonics(directions, degree)[ray_index]
    rgb = torch.sigmoid(layers(torch.cat((geometry, view), dim=-1), second))
    return 0.5 * geometry[:, 0].exp(), rgb, torch.stack(nearest).amin(dim=0)


def close(actual, expected, what):
    """float16 on CUDA, float32 on the CPU; relative to the largest value, for the parts of a sum may cancel.

    Rounding every product's operands and result to float16 errs by up to 3e-3; one unit that is off in a layer, or a
    ReLU that leaks a twentieth, by 5e-2 and more.
    """
    tolerance = (1e-5 if actual.device.type == "cpu" else 1e-2) * float(expected.abs().max())
    torch.testing.assert_close(
        actual.cpu().double(), expected, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize(
    "changes", [{}, {"hidden": 1, "geometry": 1}, {"view_degree": 0, "width": 16}, {"view_degree": 3}], ids=str
)
def test_network_is_two_chains_of_matrix_products(device, changes):
    decoder = network_decoder(**changes).to(device)
    features = torch.randn(4000, 12, dtype=torch.float16).double()
    directions, ray_index = unit_directions(7, torch.float64), torch.randint(7, (4000,)).sort().values
    weights = [weight.detach().cpu().double().requires_grad_() for weight in decoder.parameters()]
    split = len(decoder.density_network)

    def expect(features, ray_index):
        return plain(features, directions, ray_index, weights[:split], weights[split:], decoder.view_degree)

    # A unit within rounding of zero is on or off by chance, and with it a whole share of the gradient: such rows would
    # say nothing about the network. Of float16, 0.02 is ten times the rounding and more.
    clear = (expect(features, ray_index)[2] > 0.02).nonzero()[:, 0]
    clear = clear[torch.randperm(len(clear))[:90].sort().values]
    features, ray_index = features[clear], ray_index[clear]
    assert len(features) == 90
    given = features.to(device, torch.float32).requires_grad_()
    density, rgb = decoder(given, directions.float().to(device), ray_index.to(device))
    assert density.shape == (90,)
    assert rgb.shape == (90, 3)
    assert density.dtype == rgb.dtype == torch.float32
    torch.testing.assert_close(decoder.density(given), density)

    *expected, _ = expect(features.requires_grad_(), ray_index)
    close(density, expected[0].detach(), "density")
    close(rgb, expected[1].detach(), "rgb")
    cotangents = torch.randn(90, dtype=torch.float64), torch.randn(90, 3, dtype=torch.float64)
    torch.autograd.backward(expected, cotangents)
    torch.autograd.backward((density, rgb), [c.to(device, torch.float32) for c in cotangents])
    close(given.grad, features.grad, "features")
    for (name, weight), reference in zip(decoder.named_parameters(), weights, strict=True):
        assert weight.grad.dtype == torch.float32
        close(weight.grad, reference.grad, name)


def test_network_starts_at_the_initial_density_and_sees_all_of_its_weights(device):
    decoder = network_decoder().to(device)
    assert decoder.density(torch.zeros(3, 12, device=device)).tolist() == [0.5] * 3
    assert [tuple(w.shape) for w in decoder.density_network] == [(32, 12), (8, 32)]
    assert [tuple(w.shape) for w in decoder.color_network] == [(32, 8 + 9), (32, 32), (3, 32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_network_under_autocast(device, dtype):
    decoder = network_decoder().to(device)
    arguments = torch.randn(9, 12).to(device), unit_directions(9, device=device), torch.arange(9, device=device)
    exact = decoder(*arguments)
    with torch.autocast(device.type, dtype=dtype):
        density, rgb = decoder(*arguments)
    for value, expected in zip((density, rgb), exact, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-2)
    (density.sum() + rgb.sum()).backward()
    assert all(weight.grad.any() for weight in decoder.parameters())


# --- refusals


def harmonics_of(degree):
    return spherical_harmonics(torch.zeros(2, 3), degree)


DEGREE, SIZE = r"degree must be an int in 0\.\.3, got {}", "{} must be an int of at least 1, got 0"
SETTINGS = [(0.0, 0.1), (-1.0, 0.1), (1.0, 0.0), (1.0, -0.1), (math.nan, 0.1)]


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (lambda directions: spherical_harmonics(directions, 1), (torch.zeros(3, 2),), r"\(\.\.\., 3\), got \(3, 2\)"),
        *((make, (degree,), DEGREE.format(degree)) for make in (harmonics_of, sh_decoder) for degree in (-1, 4)),
        *((DensityActivation, each, "scale and initial must be positive") for each in SETTINGS),
        *((ExponentialDensity, (initial,), "initial must be positive, got") for initial in (0.0, -1.0, math.nan)),
        *((lambda name: mlp_decoder(**{name: 0}), (x,), SIZE.format(x)) for x in ("features", "width", "hidden")),
        *(
            (lambda name: network_decoder(**{name: 0}), (x,), SIZE.format(x))
            for x in ("channels", "width", "geometry", "hidden")
        ),
    ],
)
def test_refusals(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)
