"""Momentum with orthogonal updates, for the matrices of networks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.fields.decoders import LayerWeights
from voxelfield.foundation.optimizers import EagerMethods
from voxelfield.models.component import Component
from voxelfield.models.model import Model

# Coefficients of a x + b x^3 + c x^5, and how often it is applied: singular values between 0.002 and 1 come to lie
# between 0.68 and 1.21.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5

# A matrix with fewer rows or columns, such as the layer of output colours, has too few singular values to balance.
_FEWEST = 8

# Root mean square of a step's entries, as a multiple of the learning rate, for which one rate suits Muon and AdamW.
_STEP = 0.4


@dataclass(frozen=True)
class MatrixSettings(ComponentSettings):
    """The setting of :class:`OrthogonalMatrices`.

    Attributes:
        matrices: Update of the networks' matrices: ``muon``, orthogonal steps
            (:class:`voxelfield.components.muon.Muon`), or ``adamw``, as for all other parameters. The matrices are the
            weights of ``nn.Linear`` and of :class:`voxelfield.fields.decoders.LayerWeights` that have at least 8 rows
            and 8 columns.
    """

    name = "matrices"
    matrices: Literal["muon", "adamw"] = key("optimizer.matrices", "muon", off="adamw", fixed=True)

    def check_resumed(self, saved: Any, model: Model) -> None:
        """Raises ValueError if another optimizer has a state of the matrices, if there are any."""
        if network_matrices(model.field):
            super().check_resumed(saved, model)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        return [OrthogonalMatrices(training.model)]


class OrthogonalMatrices(Component):
    """Has the matrices of a field's networks updated by :class:`Muon`."""

    name = "matrices"

    def __init__(self, model: Model) -> None:
        self._model = model

    def network_optimizer(
        self, parameters: Sequence[nn.Parameter], lr: Tensor, betas: Sequence[float], weight_decay: float
    ) -> torch.optim.Optimizer | None:
        """Returns the optimizer, or None for networks without matrices that it suits."""
        given = {id(parameter) for parameter in parameters}
        matrices = [matrix for matrix in network_matrices(self._model.field) if id(matrix) in given]
        return Muon(matrices, lr, betas[0], weight_decay) if matrices else None


def network_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a module that Muon suits: weights of ``nn.Linear`` and of :class:`LayerWeights`.

    Those that are not float32, or have fewer than 8 rows or columns, are left out. So are tables, such as embeddings of
    images, whose rows are not a linear map, and weights that a module computes from other parameters, as weight
    normalisation does.
    """
    found: dict[int, nn.Parameter] = {}
    for each in module.modules():
        if isinstance(each, LayerWeights | nn.Linear):
            weights = [each._parameters.get("weight")] if isinstance(each, nn.Linear) else each.parameters()
            found |= {id(weight): weight for weight in weights if weight is not None and not is_lazy(weight)}
    return [each for each in found.values() if each.dtype == torch.float32 and min(each.shape) >= _FEWEST]


def orthogonalized(matrices: Tensor) -> Tensor:
    """Returns matrices with nearly the same singular vectors, all of whose singular values are near 1.

    For a matrix U S V^T of full rank this is near U V^T, computed by the quintic Newton-Schulz iteration of Jordan et
    al. 2024: products of matrices alone, which need no synchronisation with a GPU. Rows and columns of zeros stay zero.

    Args:
        matrices: (L, M, N) float32. On CUDA they are multiplied in float16, with sums in float32.

    Returns:
        (L, M, N) float32; zeros for a matrix of zeros.
    """
    x = matrices
    # By the largest entry first, because squares of small entries would underflow.
    for order in (torch.inf, 2):
        x = x / torch.linalg.vector_norm(x, order, (1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    x = x.half() if x.is_cuda else x
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()


class Muon(EagerMethods):
    """Nesterov momentum whose update of each matrix is orthogonalised, so that all directions learn equally fast.

    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks". With the gradient G, the momentum
    M = m M + (1 - m) G and the learning rate r, a matrix (rows, columns) changes by -0.4 r sqrt(max(rows, columns))
    times :func:`orthogonalized` m M + (1 - m) G. The root makes the entries' root mean square the same multiple of the
    rate for matrices of every shape (Liu et al. 2025, "Muon is scalable for LLM training", eq. 4, with 0.2); with 0.4,
    rates that suit AdamW suit Muon too.

    Apart from weight decay, a matrix stays as it is in a step in which its gradient is zero, such as one that
    ``trainer.not_finite=skip`` skips. Orthogonalised momentum does not shrink from step to step, so the matrix would
    otherwise keep moving in its last direction.

    A step does not synchronise with the device, so it can be captured in a CUDA graph. ``torch.optim.Muon`` cannot,
    because its learning rate is a number on the host.

    Args:
        matrices: Float32 parameters of two dimensions, all on one device. They are padded to one size with zeros and
            orthogonalised together.
        lr: Learning rate, (1,) on that device; the tensor is read in each step.
        momentum: The m of the formula, at least 0 and below 1.
        weight_decay: Decoupled weight decay, at least 0.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: Tensor, momentum: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._complete_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._complete_state()

    def _complete_state(self) -> None:
        """Allocates momentum where there is none; a captured step would set it to zero again in each replay."""
        for group in self.param_groups:
            for matrix in group["params"]:
                self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the matrices that have a gradient."""
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if matrices:
                self._update(matrices, group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        means: list[Tensor] = [self.state[matrix]["momentum"] for matrix in matrices]
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        side = max(max(matrix.shape) for matrix in matrices)
        padded = means[0].new_zeros(len(matrices), side, side)
        ahead = torch._foreach_lerp(gradients, means, group["momentum"])
        torch._foreach_copy_(_parts(padded, matrices), ahead)
        present = torch.stack(torch._foreach_norm(gradients, torch.inf)) > 0
        steps = _parts(orthogonalized(padded * present[:, None, None]), matrices)
        torch._foreach_mul_(steps, [_STEP * math.sqrt(max(matrix.shape)) for matrix in matrices])
        if group["weight_decay"] != 0:
            torch._foreach_add_(steps, matrices, alpha=group["weight_decay"])
        torch._foreach_mul_(steps, group["lr"].reshape(()))
        torch._foreach_sub_(matrices, steps)


def _parts(padded: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Returns the views of padded matrices that hold matrices of these shapes."""
    return [each[: matrix.shape[0], : matrix.shape[1]] for each, matrix in zip(padded, matrices, strict=True)]
