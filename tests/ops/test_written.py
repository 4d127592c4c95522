"""Ops that write in place: they raise the versions of what they write, so that no stale value is differentiated."""

from __future__ import annotations

import pytest
import torch
from op_contracts import one_call_of_each, tensors

from voxelfield import _library


def split_by_schema(name, arguments):
    """Returns the tensors that an op writes according to its schema, and its other tensors."""
    schema = getattr(torch.ops.voxelfield, name).default._schema
    both = [], []
    for argument, value in zip(schema.arguments, arguments, strict=True):
        both[not (argument.alias_info and argument.alias_info.is_write)].extend(tensors([value]))
    return both


def calls_that_write(device):
    """A call of every op whose schema says that it writes: its name, its arguments, and the tensors it writes."""
    _library.ensure_loaded(device.type)
    calls = [(name, given, *split_by_schema(name, given)) for name, given in one_call_of_each(device).items()]
    calls = [call for call in calls if call[2]]
    assert {"grid_adam_", "sum_duplicates_"} <= {name for name, *_ in calls}
    return calls


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_ops_raise_the_versions_of_the_tensors_that_they_write(device, mode):
    for name, arguments, written, others in calls_that_write(device):
        written, others = ([(x, x._version) for x in given] for given in (written, others))
        with mode():
            getattr(torch.ops.voxelfield, name)(*arguments)
        assert all(x._version > before for x, before in written), name
        assert all(x._version == before for x, before in others), name


def test_backward_refuses_what_an_op_has_written_since(device):
    factor = torch.ones((), device=device, requires_grad=True)
    for name, arguments, written, others in calls_that_write(device):
        stale, fresh = ([(factor * x).sum() for x in given] for given in (written, others))
        getattr(torch.ops.voxelfield, name)(*arguments)
        for product in stale:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        for product in fresh:
            product.backward()


def test_ops_write_inference_tensors_without_versions(device):
    with torch.inference_mode():
        for name, arguments, *_ in calls_that_write(device):
            getattr(torch.ops.voxelfield, name)(*arguments)


def test_functions_raise_the_versions_of_what_ops_write_in_them(device):
    _library.ensure_loaded(device.type)
    sums, weights = torch.randn(3, 3, 3, 1, device=device), torch.ones(3, device=device)

    class Smoothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, factor):
            torch.ops.voxelfield.grid_total_variation_grad_(sums, sums.clone(), weights, 1.0, None, None)
            return factor.clone()

        @staticmethod
        def backward(ctx, grad):
            torch.ops.voxelfield.grid_total_variation_grad_(sums, sums.clone(), weights, 1.0, None, None)
            return grad

    factor = torch.ones((), device=device, requires_grad=True)
    before_forward = (factor * sums).sum()
    smoothed = Smoothing.apply(factor)
    before_backward = (factor * sums).sum()
    smoothed.backward()
    for product in (before_forward, before_backward):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_a_compiled_graph_writes_and_raises_versions(device):
    _library.ensure_loaded(device.type)
    param, weights = torch.randn(4, 4, 4, 2, device=device), torch.ones(3, device=device)

    def smooth(grad):
        torch.ops.voxelfield.grid_total_variation_grad_(grad, param, weights, 1.0, None, None)
        return grad.sum()

    eager, compiled = torch.zeros_like(param), torch.zeros_like(param)
    version = compiled._version
    expected = smooth(eager)
    actual = torch.compile(smooth, fullgraph=True, backend="aot_eager")(compiled)
    assert eager.any()
    torch.testing.assert_close((actual, compiled), (expected, eager))
    assert compiled._version > version
