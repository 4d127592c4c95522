"""A small multilayer perceptron, evaluated in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.foundation import constants
from voxelfield.foundation.autograd import MaybeTensor
from voxelfield.foundation.checks import FLOATING, check_dtype, check_tensor, coordinate_dtype
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError
from voxelfield.ops._table import declare


def mlp(input: Tensor, weights: Sequence[Tensor], *, count: Tensor | None = None) -> Tensor:
    """Evaluates a multilayer perceptron with ReLU activations between its layers and no biases.

    The result is ``relu(... relu(input @ weights[0].T) ...) @ weights[-1].T``. On CUDA one kernel runs all layers on
    tensor cores and keeps activations in registers (the fully fused network of Mueller et al. 2021, "Real-time neural
    radiance caching for path tracing", section 4.1). The backward pass is one kernel too, which recomputes the
    activations instead of storing them. If the weights do not fit the shared memory of a block, the kernels read them
    from global memory: the result is the same, but slower, and the first such call warns. On the CPU the layers are
    torch's matrix products.

    Sums are accumulated in float32 (float64 for float64 ``input``). Activations are rounded to the dtype of ``input``
    after each layer, and so are the gradients with respect to them. float16 gradients below 6e-8 become zero, and those
    below 6e-5 lose precision: in training, scale the loss up and the weights' gradients down again.

    Args:
        input: (N, in). On CUDA float16; on the CPU float32, float64, float16 or bfloat16. Differentiable.
        weights: 2 to 16 matrices (out, in), each with as many columns as the one before has rows; all sizes 1 to 128.
            They have the dtype of ``input``, or are float32 for a 16-bit ``input``; float32 weights are then rounded
            before use, and their gradients are float32. Differentiable. On CUDA hidden layers are padded to the next
            power of two of the widest one, at least 16, ``in`` to a multiple of 32 and ``out`` to a multiple of 16. An
            ``in`` that is not a multiple of 4 costs copies of ``input`` and of its gradient, and an ``out`` above 8
            that is not a multiple of 4 costs copies of the result and of its gradient.
        count: A tensor of one int32 or int64 on the device of ``input``: the number of leading rows to evaluate, read
            by the kernels when they run. For the remaining rows the results and the gradients in ``input`` are zeros,
            and these rows contribute nothing to the gradients in ``weights``. None: all rows.

    Returns:
        (N, out) in the dtype of ``input``. Differentiable once, in reverse mode; the gradients are the same in every
        run on a device.

    Raises:
        TypeError: An argument is not a tensor (or ``weights`` not a sequence of tensors), or has the wrong dtype. On
            CUDA ``input`` must be float16; for wider dtypes use ``torch.nn.functional.linear``.
        ValueError: An argument has the wrong shape or is not on the device of ``input``, or there are too few or too
            many ``weights``.
        NotImplementedError: A second derivative is requested.
        RuntimeError: On CUDA, there are more than 2^30 rows.
    """
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence):
        raise ArgumentTypeError(f"weights must be a sequence of torch.Tensors, got {type(weights).__name__}")
    return _mlp(input, list(weights), count)


def _check(input: Tensor, weights: list[Tensor], count: MaybeTensor) -> None:
    check_tensor("input", input, ("N", "in"))
    if input.is_cuda:
        check_dtype("input", input, (torch.float16,), " on CUDA (torch.nn.functional.linear runs other dtypes there)")
    check_dtype("input", input, FLOATING)
    if count is not None:
        check_tensor("count", count, () if count.dim() == 0 else (1,))
        check_dtype("count", count, (torch.int32, torch.int64))
    if not 2 <= len(weights) <= constants.MAX_LAYERS:
        raise ArgumentValueError(f"weights must be 2 to {constants.MAX_LAYERS} tensors, got {len(weights)}")
    names = [f"weights[{layer}]" for layer in range(len(weights))]
    columns = input.shape[1]
    for name, weight in zip(names, weights, strict=True):
        source = f" as input of shape {tuple(input.shape)}" if name == names[0] else " as the layer before"
        check_tensor(name, weight, ("out", columns), f" to take {columns} columns{source} gives")
        if not (1 <= weight.shape[0] <= constants.MAX_WIDTH and 1 <= columns <= constants.MAX_WIDTH):
            raise ArgumentValueError(
                f"{name} must have 1 to {constants.MAX_WIDTH} rows and columns, got shape {tuple(weight.shape)}"
            )
        if weight is weights[0]:
            wide = torch.float64 if input.dtype == torch.float64 else torch.float32
            check_dtype(name, weight, (input.dtype, wide), f" for {str(input.dtype).removeprefix('torch.')} input")
        else:
            check_dtype(name, weight, (weights[0].dtype,), f" as {names[0]} is")
        columns = weight.shape[0]


def _backward_results(input: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    sums = [weight.new_empty(weight.shape, dtype=coordinate_dtype(input.dtype)) for weight in weights]
    return input.new_empty(input.shape), sums


_mlp = declare(
    "mlp",
    lambda input, weights: input.new_empty(input.shape[0], weights[-1].shape[0]),
    check=_check,
    gradients=lambda backward: backward(),
    differentiable=("input", "weights"),
)
_mlp_backward = declare(
    "mlp_backward", _backward_results, refusal="mlp is differentiable once; a second derivative was asked for"
)
