"""Loss terms against values and gradients worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from rendered_batch import rendered
from torch import Tensor

from voxelfield.components.structure import structure_weights, variance_weighted_mse
from voxelfield.evaluation.metrics import ssim
from voxelfield.models import losses
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.settings import LossWeights
from voxelfield.ops import PackedSamples
from voxelfield.rendering.render import Rendering
from voxelfield.settings import LossConfig
from voxelfield.training.step import backpropagate


def make_rendering(
    weights=(0.5, 0.25, 0.5),
    sample_rgb=((1.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.5, 0.5)),
    ray_index=(0, 0, 2),
    opacity=(0.75, 0.0, 0.5),
    rays_kept=None,
    device="cpu",
) -> Rendering:
    """Three rays: the first with two samples, the second with none, the third with one."""
    count, rays = len(weights), len(opacity)
    rays_kept, row = rays if rays_kept is None else rays_kept, torch.arange(rays, device=device)
    index = torch.tensor(ray_index, device=device)
    samples = PackedSamples(
        positions=torch.zeros(count, 3, device=device),
        t=torch.ones(count, device=device),
        dt=torch.ones(count, device=device),
        ray_index=index,
        ray_offsets=torch.searchsorted(index, torch.arange(rays + 1, device=device)),
        rays_kept=torch.tensor([rays_kept], device=device),
    )
    return Rendering(
        distortion=(torch.arange(1.0, rays + 1, device=device) * (row < rays_kept)).requires_grad_(),
        rgb=torch.zeros(rays, 3, device=device),
        opacity=torch.tensor(opacity, device=device, requires_grad=True),
        depth_sum=torch.zeros(rays, device=device),
        samples=samples,
        density=3 * torch.tensor(weights, device=device, requires_grad=True),
        weights=torch.tensor(weights, device=device, requires_grad=True),
        sample_rgb=torch.tensor(sample_rgb, device=device, requires_grad=True),
        candidates=torch.tensor(count, device=device),
        rays_kept=torch.tensor(rays_kept, device=device),
    )


def make_config(**values) -> LossConfig:
    nothing = dict.fromkeys((field.name for field in dataclasses.fields(LossConfig)), 0.0)
    return LossConfig(**nothing | {"tv_every": 1, "tv_until": 100} | values)


def terms_of(rendering: Rendering, pixels: Tensor, truth: Tensor, field_truth: Tensor | None = None, **weights: float):
    """The weighted terms of a rendering."""
    batch = rendered(rendering, pixels, truth, field_truth=field_truth)
    return losses.rendering_terms(make_config(**weights)).losses(*batch)


def batch_of(rendering: Rendering) -> tuple[Outputs, Batch]:
    """One ray a pixel, all black as they should be: for terms that look at neither."""
    black = torch.zeros_like(rendering.rgb)
    return rendered(rendering, black, black)


def test_every_term_has_a_weight_that_is_switched_off_by_zero():
    for name in (field.name for field in dataclasses.fields(LossWeights)):
        outputs, batch = batch_of(make_rendering())
        batch = dataclasses.replace(batch, look_up=lambda _, pixels: torch.full_like(pixels, 255))
        terms = losses.rendering_terms(make_config(**{name: 1.0})).losses(outputs, batch)
        assert list(terms) == ["photometric", name]


def test_photometric_is_the_mean_over_pixels_and_channels(device):
    pixels = torch.tensor([[0.5, 0.0, 1.0], [0.25, 0.5, 0.0], [0.0, 0.0, 0.0]], device=device, requires_grad=True)
    truth = torch.tensor([[0.0, 0.0, 1.0], [0.25, 1.0, 1.0], [0.0, 0.0, 0.0]], device=device)
    (loss,) = terms_of(make_rendering(device=device), pixels, truth).values()
    assert loss.item() == pytest.approx((0.25 + 0.25 + 1) / 9)
    loss.backward()
    torch.testing.assert_close(pixels.grad, (pixels.detach() - truth) * 2 / 9)


def test_weights_of_pixels_multiply_all_errors_of_colours(device):
    *rows, structure = torch.rand(3, 242, 3, device=device)
    rendering = make_rendering(opacity=(1.0,) * len(rows[0]), device=device)
    single = rendering.sample_rgb.detach() - rows[1][rendering.samples.ray_index]
    weights = torch.rand(len(rows[0]), device=device)
    outputs, batch = rendered(rendering, *rows, structure=structure[:, 0])
    batch.weigh(0.5 * weights)
    batch.weigh(torch.full_like(weights, 2.0))
    terms = losses.rendering_terms(make_config(sample_rgb=1.0)).losses(outputs, batch)
    terms["structure"] = variance_weighted_mse(outputs, batch)
    squares = weights[:, None] * (rows[0] - rows[1]).square()
    of_samples = (weights[rendering.samples.ray_index] * rendering.weights * single.square().sum(dim=1)).sum()
    expected = {
        "photometric": squares.mean(),
        "sample_rgb": of_samples / len(weights),
        "structure": (structure[:, :1] * squares).mean() / 9e-4,
    }
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value.to(terms[name].dtype), rtol=1e-4, atol=1e-7, msg=name)


def weights_of(photograph: Tensor) -> Tensor:
    """The weights (H, W) of the pixels of an opaque photograph (H, W, 3), in [0, 1]."""
    rgba = torch.cat((photograph, torch.ones_like(photograph[..., :1])), dim=-1)
    return structure_weights((rgba * 255).round().to(torch.uint8)[None])[0].float().to(photograph.device) / 255


def test_structure_is_the_dissimilarity_of_an_image_with_small_errors(device):
    # texture whose contrast grows from left to right, and noise of the same strength everywhere
    contrast = torch.linspace(0, 0.2, 64, device=device)[:, None]
    truth = ((0.5 + contrast * torch.randn(64, 64, 3, device=device)).clamp(0, 1) * 255).round() / 255
    pixels = truth + 0.005 * torch.randn(64, 64, 3, device=device)
    weights = weights_of(truth)
    inner = slice(5, -5)
    batch = rendered(
        make_rendering(opacity=(1.0,) * 54**2, device=device),
        pixels[inner, inner].flatten(0, 1),
        truth[inner, inner].flatten(0, 1),
        structure=weights[inner, inner].flatten(),
    )
    loss = 3 * variance_weighted_mse(*batch)
    assert loss.item() == pytest.approx(3 * (1 - ssim(pixels, truth).item()), rel=0.1)


def test_structure_counts_a_constant_offset_in_full_where_the_photograph_is_flat(device):
    truth = torch.full((12, 12, 3), 102 / 255, device=device)
    weights = weights_of(truth)
    rendering = make_rendering(opacity=(1.0,) * 144, device=device)
    pixels = truth + 0.01
    batch = rendered(rendering, pixels.flatten(0, 1), truth.flatten(0, 1), structure=weights.flatten())
    assert variance_weighted_mse(*batch).item() == pytest.approx(0.01**2 / 0.03**2, rel=1e-4)
    assert 1 - ssim(pixels, truth).item() < 1e-3


def test_structure_is_a_weighted_mean_over_pixels_all_of_whose_rays_count(device):
    pixels, truth = torch.rand(2, 5, 3, device=device)
    weights = torch.tensor([1.0, 0.25, 0.0, 0.5, 1.0], device=device)
    pixels.requires_grad_()
    for rays_kept, count in ((20, 5), (19, 4), (8, 2), (3, 0)):
        rendering = make_rendering(opacity=(1.0,) * 20, rays_kept=rays_kept, device=device)
        loss = variance_weighted_mse(*rendered(rendering, pixels, truth, structure=weights))
        errors = weights[:count, None] * (pixels - truth)[:count].square() / 0.03**2
        expected = errors.mean() if count > 0 else 0 * errors.sum()
        torch.testing.assert_close(loss, expected)
        found, wanted = (torch.autograd.grad(value, pixels)[0] for value in (loss, expected))
        torch.testing.assert_close(found, wanted)


def test_sample_rgb_is_weighted_by_sample_and_averaged_over_rays(device):
    rendering = make_rendering(device=device)
    truth = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, 0.0, 1.0]], device=device)
    loss = terms_of(rendering, truth, truth, sample_rgb=1.0)["sample_rgb"]
    # squared errors 1, 0 and 0.5; the ray without samples counts in the mean
    assert loss.item() == pytest.approx((0.5 * 1 + 0.25 * 0 + 0.5 * 0.5) / 3)
    loss.backward()
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.5, -0.5]], device=device) / 3
    torch.testing.assert_close(rendering.sample_rgb.grad, expected)
    assert rendering.weights.grad is None, "the term must move colours, not geometry"


def test_samples_are_compared_with_what_the_fields_colours_should_be(device):
    rendering = make_rendering(device=device)
    truth = torch.rand(3, 3, device=device)
    exposed = terms_of(rendering, 0.5 * truth, 0.5 * truth, field_truth=truth, sample_rgb=1.0)
    expected = terms_of(rendering, truth, truth, sample_rgb=1.0)
    assert exposed["photometric"] == 0
    assert exposed["sample_rgb"] == expected["sample_rgb"] > 0


def test_opacity_entropy_has_its_values_and_slope(device):
    rendering = make_rendering(opacity=(0.5, 0.25), device=device)
    loss = losses.opacity_entropy(*batch_of(rendering))
    assert loss.item() == pytest.approx((math.log(2) - 0.25 * math.log(0.25) - 0.75 * math.log(0.75)) / 2)
    loss.backward()
    # dH/do = log((1 - o) / o), over two rays
    torch.testing.assert_close(rendering.opacity.grad, torch.tensor([0.0, math.log(3) / 2], device=device))


def test_opacity_entropy_is_finite_and_small_where_pixels_are_decided(device):
    rendering = make_rendering(opacity=(0.0, 1.0, 1.0 + 1e-6), device=device)
    loss = losses.opacity_entropy(*batch_of(rendering))
    loss.backward()
    assert 0 <= loss.item() < 1e-3
    assert rendering.opacity.grad.isfinite().all()


def test_sparsity_has_its_value_and_slope(device):
    density = torch.tensor([0.0, 0.5, 1.0], device=device, requires_grad=True)
    rendering = dataclasses.replace(make_rendering(opacity=(0.0,) * 4, device=device), density=density)
    loss = losses.sparsity(*batch_of(rendering))
    assert loss.item() == pytest.approx((math.log(1.5) + math.log(3)) / 4)
    loss.backward()
    # d/ds log(1 + 2 s^2) = 4 s / (1 + 2 s^2)
    torch.testing.assert_close(density.grad, torch.tensor([0.0, 2 / 1.5, 4 / 3], device=device) / 4)


def test_terms_without_samples_are_zero_and_differentiable(device):
    rendering = Rendering(
        rgb=torch.zeros(2, 3, device=device),
        opacity=torch.zeros(2, device=device, requires_grad=True),
        depth_sum=torch.zeros(2, device=device),
        samples=PackedSamples(
            torch.zeros(0, 3, device=device),
            torch.zeros(0, device=device),
            torch.zeros(0, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.tensor([2], device=device),
        ),
        density=torch.zeros(0, device=device, requires_grad=True),
        weights=torch.zeros(0, device=device, requires_grad=True),
        sample_rgb=torch.zeros(0, 3, device=device, requires_grad=True),
        candidates=torch.zeros((), dtype=torch.int64, device=device),
        rays_kept=torch.tensor(2, device=device),
    )
    truth = torch.full((2, 3), 0.5, device=device)
    terms = terms_of(rendering, rendering.over(torch.zeros(3, device=device)), truth, sample_rgb=1.0, sparsity=1.0)
    assert {name: value.item() for name, value in terms.items()} == {
        "photometric": 0.25,
        "sample_rgb": 0.0,
        "sparsity": 0.0,
    }
    torch.stack(list(terms.values())).sum().backward()


def test_terms_carry_their_weights_and_absent_ones_are_left_out():
    rendering, prediction, truth = make_rendering(), torch.full((3, 3), 0.5), torch.ones(3, 3)
    assert set(terms_of(rendering, prediction, truth)) == {"photometric"}
    weights = {"sample_rgb": 2.0, "distortion": 5.0, "opacity_entropy": 3.0, "sparsity": 4.0}
    terms = terms_of(rendering, prediction, truth, **weights)
    expected = {
        "photometric": 0.25,
        # squared errors 2, 3 and 0.75, of weight 0.5, 0.25 and 0.5
        "sample_rgb": 2 * (1 + 0.75 + 0.375) / 3,
        "distortion": 5 * 2.0,
        "opacity_entropy": 3 * losses.opacity_entropy(*batch_of(rendering)).item(),
        "sparsity": 4 * losses.sparsity(*batch_of(rendering)).item(),
    }
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(expected)


def test_a_pixel_of_which_a_ray_had_no_room_does_not_count():
    """Two pixels of two rays each; of the second pixel one ray had no room."""
    rendering = make_rendering(
        ray_index=(0, 1, 2),
        weights=(0.5, 0.25, 1.0),
        sample_rgb=((1.0, 0.0, 0.0),) * 3,
        opacity=(0.0,) * 4,
        rays_kept=3,
    )
    pixels, truth = torch.tensor([[0.5] * 3, [5.0] * 3]), torch.tensor([[0.25] * 3, [0.0] * 3])
    terms = terms_of(rendering, pixels, truth, sample_rgb=1.0, distortion=1.0)
    assert terms["photometric"].item() == pytest.approx((0.5 - 0.25) ** 2)
    first, second = 0.75**2 + 2 * 0.25**2, 1.0
    assert terms["sample_rgb"].item() == pytest.approx((0.75 * first + second) / 3)
    assert terms["distortion"].item() == pytest.approx((1 + 2 + 3) / 3)


def test_distortion_must_have_been_rendered():
    rendering = dataclasses.replace(make_rendering(), distortion=None)
    with pytest.raises(ValueError, match=r"config\.distortion"):
        losses.rendering_terms(make_config(distortion=1.0)).losses(*batch_of(rendering))


def test_rays_without_room_count_for_nothing(device):
    """Two of three rays were kept, and one row of the samples' room is not used."""
    settings = {"sample_rgb": 1.0, "distortion": 1.0, "opacity_entropy": 1.0, "sparsity": 1.0}
    rendering = make_rendering(ray_index=(0, 1, 2), weights=(0.5, 0.25, 0.0), rays_kept=2, device=device)
    rendering.samples.ray_offsets[3:] = 2
    truth = torch.rand(3, 3, device=device)
    prediction = torch.rand(3, 3, device=device)
    prediction[2:] = torch.nan
    rendering.density.data[2] = 100.0
    terms = terms_of(rendering, prediction, truth, **settings)

    alone = make_rendering(
        weights=(0.5, 0.25),
        sample_rgb=((1.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        ray_index=(0, 1),
        opacity=(0.75, 0.0),
        device=device,
    )
    expected = terms_of(alone, prediction[:2], truth[:2], **settings)
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term, msg=name)
    torch.stack(list(terms.values())).sum().backward()
    assert rendering.opacity.grad[2] == 0
    assert rendering.opacity.grad[:2].any()


def test_no_ray_taken_is_no_loss(device):
    nothing = make_rendering(weights=(0.0,) * 3, opacity=(0.0,) * 3, rays_kept=0, device=device)
    pixels, truth = torch.ones(3, 3, device=device), torch.zeros(3, 3, device=device)
    terms = terms_of(nothing, pixels, truth, sample_rgb=1.0, distortion=1.0, opacity_entropy=1.0)
    assert {name: term.item() for name, term in terms.items()} == dict.fromkeys(terms, 0.0)
    assert len(terms) == 4


def test_gradients_are_those_of_the_sum_times_the_factor(device):
    x = torch.tensor([1.0, 2.0, 3.0], device=device, requires_grad=True)
    backpropagate([x.square().sum(), 3 * x[0], x[2] * x[1]], torch.tensor(8.0, device=device))
    torch.testing.assert_close(x.grad, 8 * torch.tensor([2 + 3.0, 4 + 3.0, 6 + 2.0], device=device))
    backpropagate([x[1]], torch.tensor(2.0, device=device))  # adds to what is there
    assert x.grad[1] == 8 * 7 + 2
