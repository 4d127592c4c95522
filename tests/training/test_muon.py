"""Muon against plain matrix products and singular value decompositions, and the matrices that it is given."""

from __future__ import annotations

import copy

import pytest
import torch
from grid_models import model_of, optimizers_of
from torch import nn

from voxelfield import VoxelGrid
from voxelfield.components.muon import Muon, network_matrices, orthogonalized
from voxelfield.fields.decoders import ColorMLPDecoder, FusedMLPDecoder, LayerWeights
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.settings import OptimizerConfig, RatesConfig
from voxelfield.training.execution import GraphedCall

SHAPES = [(24, 16), (16, 40), (32, 32)]


def matrices_of(device: torch.device, scale: float = 1.0) -> list[nn.Parameter]:
    return [nn.Parameter(scale * torch.randn(shape).to(device)) for shape in SHAPES]


def small_field(device: torch.device | str) -> RadianceField:
    decoder = ColorMLPDecoder(4, 16, 2, 1, DensityActivation(10.0, 0.1))
    return RadianceField(VoxelGrid(4, decoder.channels, ((0, 0, 0), (1, 1, 1))), decoder).to(device)


def reference(gradient: torch.Tensor, mean: torch.Tensor, momentum: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of gradients after a step, and the direction of the step, in float64 and without padding."""
    mean = momentum * mean + (1 - momentum) * gradient
    x = momentum * mean + (1 - momentum) * gradient
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return mean, x


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay_and_singular_values_come_near_one(device, shape):
    left, right = torch.linalg.qr(torch.randn(shape[0], 16))[0], torch.linalg.qr(torch.randn(shape[1], 16))[0]
    values = torch.logspace(0, -2, 16)
    result = orthogonalized(1e-7 * (left * values @ right.T).to(device)[None])[0].cpu()
    inner = left.T @ result @ right
    assert (inner.diagonal() > 0.65).all()
    assert (inner.diagonal() < 1.25).all()
    assert (inner - inner.diagonal().diag()).abs().max() < 0.05
    torch.testing.assert_close(left @ inner @ right.T, result, rtol=0, atol=0.02)


def test_zeros_remain_zeros(device):
    matrices = torch.randn(3, 16, 16, device=device)
    matrices[0] = 0
    matrices[1, 5:] = 0
    result = orthogonalized(matrices)
    assert not result[0].any()
    assert not result[1, 5:].any()
    assert result[1, :5].any()


@pytest.mark.parametrize("exponent", [-44, -40, -25, 25])
def test_tiny_and_huge_entries_are_as_good_as_others(device, exponent):
    matrix = torch.randn(1, 16, 16, device=device)
    result = orthogonalized(matrix * 10.0**exponent)
    assert result.isfinite().all()
    if exponent > -38:  # smaller numbers have fewer digits
        torch.testing.assert_close(result, orthogonalized(matrix), rtol=0, atol=1e-2)


def test_matrices_stay_while_gradients_are_zero(device):
    matrices = matrices_of(device)
    muon = Muon(matrices, torch.tensor([0.01], device=device), 0.9)
    for step in range(600):
        for matrix in matrices:
            matrix.grad = torch.full_like(matrix, 1e-3 if step == 0 else 0.0)
        muon.step()
        if step == 0:
            before = [matrix.detach().clone() for matrix in matrices]
    torch.testing.assert_close(matrices, before, rtol=0, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 2.0])
def test_steps_are_those_of_plain_products(device, weight_decay):
    matrices = matrices_of(device)
    expected = [matrix.detach().double() for matrix in matrices]
    means = [torch.zeros_like(each) for each in expected]
    rate = torch.tensor([0.01], device=device)
    muon = Muon(matrices, rate, 0.9, weight_decay)
    for number in range(3):
        rate.fill_(0.01 / (1 + number))  # the tensor is read in each step
        for i, matrix in enumerate(matrices):
            matrix.grad = torch.randn(SHAPES[i]).to(device)
            means[i], direction = reference(matrix.grad.double(), means[i], 0.9)
            lr = float(rate)
            expected[i] = (1 - lr * weight_decay) * expected[i] - 0.4 * lr * max(SHAPES[i]) ** 0.5 * direction
        muon.step()
    for matrix, wanted in zip(matrices, expected, strict=True):
        torch.testing.assert_close(
            matrix.detach().double(), wanted, rtol=0, atol=1e-5 if device.type == "cpu" else 1e-3
        )


def test_a_matrix_without_a_gradient_stays_as_it_is(device):
    first, second, third = matrices_of(device)
    before = [each.detach().clone() for each in (first, second, third)]
    first.grad, third.grad = torch.randn_like(first), torch.zeros_like(third)
    Muon([first, second, third], torch.tensor([0.1], device=device), 0.9).step()
    assert not torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert torch.equal(third, before[2])


def test_steps_continue_from_a_saved_state():
    matrices = matrices_of(torch.device("cpu"))
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(4)]
    muon = Muon(matrices, torch.tensor([0.01]), 0.9)

    def take(optimizer, own, steps):
        for step in steps:
            for matrix, gradient in zip(own, step, strict=True):
                matrix.grad = gradient
            optimizer.step()

    take(muon, matrices, gradients[:2])
    again = copy.deepcopy(matrices)
    resumed = Muon(again, torch.tensor([0.01]), 0.9)
    resumed.load_state_dict(copy.deepcopy(muon.state_dict()))
    take(muon, matrices, gradients[2:])
    take(resumed, again, gradients[2:])
    torch.testing.assert_close(matrices, again, rtol=0, atol=0)


def test_a_state_without_momentum_starts_anew():
    (matrix, *_) = matrices_of(torch.device("cpu"))
    muon = Muon([matrix], torch.tensor([0.01]), 0.9)
    muon.load_state_dict({**muon.state_dict(), "state": {}})
    matrix.grad = torch.randn_like(matrix)
    before = matrix.detach().clone()
    muon.step()
    assert not torch.equal(matrix, before)


@pytest.mark.cuda
def test_a_captured_step_reads_the_rate_anew():
    device = torch.device("cuda")
    matrices = matrices_of(device)
    plain = copy.deepcopy(matrices)
    rate = torch.tensor([0.01], device=device)
    gradients = [torch.randn_like(matrix) for matrix in matrices]

    def give(own):
        for matrix, gradient in zip(own, gradients, strict=True):
            matrix.grad = gradient
        return own

    muon, other = Muon(give(matrices), rate, 0.9), Muon(give(plain), rate, 0.9)
    call = GraphedCall(muon.step, device)
    for number in range(8):
        rate.fill_(0.01 / (1 + number))
        for gradient in gradients:
            gradient.normal_()
        call()
        other.step()
    torch.testing.assert_close(matrices, plain)


def test_computed_lazy_and_float64_weights_are_left_out():
    normalised = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    assert network_matrices(nn.Sequential(normalised, nn.LazyLinear(16), nn.Linear(16, 16).double())) == []


def test_matrices_of_networks_are_found_and_tables_are_not():
    module = nn.Module()
    module.hidden, module.narrow, module.images = nn.Linear(16, 8), nn.Linear(16, 3), nn.Embedding(100, 16)
    module.fused, module.table = LayerWeights(16, 32, 3), nn.Parameter(torch.zeros(64, 64))
    module.again = module.hidden
    assert [id(each) for each in network_matrices(module)] == [id(module.hidden.weight), id(module.fused[0])]


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_every_parameter_has_one_optimizer(device, rule):
    decoder = FusedMLPDecoder(4, 32, 16, 2, 2, ExponentialDensity(1.0))
    field = RadianceField(VoxelGrid(4, 4, ((0, 0, 0), (1, 1, 1)), init_std=0.1), decoder).to(device)
    optimizers = optimizers_of(model_of(field), OptimizerConfig(matrices=rule), RatesConfig())
    own = [optimizers.grid, *optimizers.networks.values()]
    given = [id(p) for each in own for group in each.param_groups for p in group["params"]]
    assert sorted(given) == sorted(id(parameter) for parameter in field.parameters())
    assert ("matrices" in optimizers.networks) == (rule == "muon")
    if rule == "muon":
        # Density 4-32-16 and colour 25-32-32-3: the last matrix has three rows, the first four columns.
        shapes = [tuple(matrix.shape) for matrix in optimizers.networks["matrices"].param_groups[0]["params"]]
        assert shapes == [(16, 32), (32, 25), (32, 32)]


def test_parameters_with_a_rate_of_their_own_are_left_to_it(device):
    field = small_field(device)
    first = field.decoder.network[0].weight
    optimizers = optimizers_of(model_of(field), OptimizerConfig(), RatesConfig(), first=([first], 0.25))
    before = first.detach().clone()
    first.sum().backward()
    optimizers.step()
    torch.testing.assert_close(first.detach(), before - 0.25)
    assert all(p is not first for p in optimizers.networks["matrices"].param_groups[0]["params"])


def test_a_checkpoint_carries_the_momentum_and_leaves_the_rate_as_configured(device):
    field, other = small_field(device), small_field(device)
    optimizers, resumed = (optimizers_of(model_of(each), OptimizerConfig(), RatesConfig()) for each in (field, other))
    field.decoder.network[0].weight.square().sum().backward()
    optimizers.step()
    resumed.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    (matrix, *_), (twin, *_) = (each.networks["matrices"].param_groups[0]["params"] for each in (optimizers, resumed))
    assert torch.equal(
        *(each.networks["matrices"].state[own]["momentum"] for each, own in ((optimizers, matrix), (resumed, twin)))
    )
    resumed.scale(0.5)
    assert resumed.networks["matrices"].param_groups[0]["lr"].item() == pytest.approx(0.5 * 1.5 * 0.005)
    assert resumed.rates()["network"] == pytest.approx(0.5 * 1.5 * 0.005)


def test_a_group_must_not_have_the_name_of_an_optimizer_of_the_field():
    field = small_field("cpu")
    group = {"matrices": ([field.decoder.network[0].bias], 0.1)}
    with pytest.raises(ValueError, match=r"^groups must not have the name of the field's own .*, got 'matrices'$"):
        optimizers_of(model_of(field), OptimizerConfig(), RatesConfig(), **group)
