"""Every op and public function, by the table of contracts in ``op_contracts.py``: what is promised of all of them.

Derivatives in every mode, and maps, are right or refused by name, never a silent zero.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import re
import weakref
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from op_contracts import CONTRACTS, RAYS, SAMPLING, named_tensors, one_call_of_each, raw_calls, replaced, tensors
from op_testing import LAYOUTS, deterministic, threads
from tolerances import assert_matches
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from voxelfield import _library, ops
from voxelfield.ops import _internal
from voxelfield.ops._table import TABLE, Op

# Public functions beside the ops.
HELPERS = {
    *("pieces_of", "sphere_points", "sphere_rays", "tiles_along"),
    *("pack_sh_grid", "pyramid_image_fits"),
    "marching_cubes",  # of scikit-image
}
FUNCTIONS = [name for name, row in CONTRACTS.items() if not row.in_place]


@cache
def floating(name):
    return [key for key, x in named_tensors(CONTRACTS[name].arguments()).items() if x.is_floating_point()]


ARGUMENTS = [(name, key) for name in FUNCTIONS for key in floating(name)]
every_argument = pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=[f"{n}-{a}" for n, a in ARGUMENTS])
every_row = pytest.mark.parametrize("name", CONTRACTS)
WITH_DTYPES = [(name, dtype) for name, row in CONTRACTS.items() for dtype in row.dtypes]
every_dtype = pytest.mark.parametrize(("name", "dtype"), WITH_DTYPES, ids=[f"{n}-{str(d)[6:]}" for n, d in WITH_DTYPES])


@pytest.fixture(autouse=True)
def _kernels(request):
    device = request.getfixturevalue("device") if "device" in request.fixturenames else torch.device("cpu")
    _library.ensure_loaded(device.type)


def test_every_function_and_every_op_has_a_row():
    functions = {name for name in ops.__all__ if name.islower()}
    for found in pkgutil.iter_modules(_internal.__path__, f"{_internal.__name__}."):
        for name, value in vars(importlib.import_module(found.name)).items():
            defined = inspect.isfunction(value) and value.__module__ == found.name
            if (defined or isinstance(value, Op)) and not name.startswith("_"):
                functions.add(name)
    assert functions == {name.partition(",")[0] for name in CONTRACTS} - {"sample_in_box", "place_in_box"} | HELPERS
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    kernels = {name.removeprefix("voxelfield::") for name in registered if name.startswith("voxelfield::")}
    assert {*TABLE} == kernels == {*one_call_of_each(torch.device("cpu"))}
    for row in CONTRACTS.values():
        assert callable(row.reference) or (Path(__file__).parents[2] / row.reference).exists()


def with_leaves(name, device, dtype=None, count=8):
    """Arguments of which the floating ones require gradients, and these by name."""
    row = CONTRACTS[name]
    dtype = None if row.on_cuda and device == torch.device("cuda") else dtype
    arguments = row.arguments(device, dtype, count)
    given = named_tensors(arguments)
    leaves = {key: given[key].requires_grad_() for key in floating(name) if not row.in_place}
    return arguments, leaves


def results_and_gradients(name, arguments, leaves, call=None, lay=lambda x: x):
    """All results, and the gradients of a sum of theirs that differs from element to element; ``lay`` places it."""
    results = tensors((call or CONTRACTS[name].call)(**arguments))
    trained = [x for x in results if x.requires_grad]
    if not trained:
        return [x.detach() for x in results], []
    grads = [torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view(x.shape) for x in trained]
    grads = [lay(x) if x.dim() else x for x in grads]
    gradients = torch.autograd.grad(trained, list(leaves.values()), grads, allow_unused=True)
    return [x.detach() for x in results], [x for x in gradients if x is not None]


def assert_same(actual, expected, exactly=True, what=""):
    """Fails unless values and gradients are those expected; without ``exactly``, up to the order of sums."""
    for one, other in zip([x for part in actual for x in part], [x for part in expected for x in part], strict=True):
        assert one.dtype == other.dtype
        if exactly or not one.is_floating_point():
            assert torch.equal(one.nan_to_num(7e4), other.nan_to_num(7e4)), what
        else:
            eps = torch.finfo(one.dtype).eps
            largest = float(other.nan_to_num().abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=4 * eps, atol=64 * eps * max(largest, 1.0), equal_nan=True)


# --- values


@every_dtype
@pytest.mark.parametrize("count", [8, 0])
def test_values_and_gradients_match_the_reference(device, name, dtype, count):
    """For no points, samples or rays too. Autocast changes nothing."""
    row = CONTRACTS[name]
    arguments, leaves = with_leaves(name, device, dtype, count)
    values, _ = results_and_gradients(name, arguments, leaves)
    plain = {key: x.detach() for key, x in named_tensors(arguments).items()}
    with torch.autocast(device.type, torch.bfloat16):
        again = row.results(replaced(arguments, plain))
    assert_same([again], [values], exactly=device.type == "cpu")
    if not callable(row.reference) or (row.on_cuda and device.type == "cuda"):
        return
    exact = {key: x.detach().cpu().double() for key, x in named_tensors(arguments).items() if x.is_floating_point()}
    exact |= {key: x.cpu() for key, x in named_tensors(arguments).items() if key not in exact}
    exact_leaves = {key: exact[key].requires_grad_() for key in leaves}
    expected = tensors(row.reference(**replaced(arguments, exact)))
    for one, other in zip(values, expected, strict=True):
        if one.is_floating_point():
            assert_matches(one.cpu().nan_to_num(7.0), other.detach().double().nan_to_num(7.0), name)
        else:
            assert torch.equal(one.cpu(), other)
    trained = [(x, y) for x, y in zip(row.results(arguments), expected, strict=True) if x.requires_grad]
    if not trained:
        return
    grads = [torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view(x.shape) for x, _ in trained]
    outputs = [y for _, y in trained if y.requires_grad]
    wanted = torch.autograd.grad(
        outputs,
        list(exact_leaves.values()),
        [g.cpu().double() for g, (_, y) in zip(grads, trained, strict=True) if y.requires_grad],
        allow_unused=True,
        materialize_grads=True,
    )
    actual = torch.autograd.grad([x for x, _ in trained], list(leaves.values()), grads, allow_unused=True)
    for key, one, other in zip(leaves, actual, wanted, strict=True):
        if one is None:
            assert key in row.constants or not other.any(), f"{key} has no gradient"
            continue
        assert one.dtype == leaves[key].dtype
        assert_matches(one.cpu(), other, f"gradient of {key}")


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout(device, name, dtype, layout):
    """Of arguments, one by one, and of the gradients that arrive."""
    arguments, leaves = with_leaves(name, device, dtype)
    expected = results_and_gradients(name, arguments, leaves)
    assert_same(results_and_gradients(name, arguments, leaves, lay=LAYOUTS[layout]), expected, exactly=False)
    for key, x in named_tensors(arguments).items():
        if x.dim() == 0 or (layout in ("part of wider rows", "misaligned") and not x.is_floating_point()):
            continue  # these put NaN around the values
        other = LAYOUTS[layout](x.detach())
        changed = leaves | {key: other.requires_grad_()} if key in leaves else leaves
        try:
            actual = results_and_gradients(name, replaced(arguments, {key: other}), changed)
        except ValueError as error:
            assert re.match(rf"{key.partition('[')[0]} must (be contiguous|start at a multiple)", str(error))  # noqa: PT017
            continue
        assert_same(actual, expected, exactly=False, what=key)


@every_row
def test_the_same_bits_in_every_run(device, name):
    """With any number of threads on the CPU, and elsewhere where determinism is asked for and not refused."""
    arguments, leaves = with_leaves(name, device, count=800)
    found = []
    try:
        for count in (1, 2, 2):
            with deterministic(device.type == "cuda"), threads(count):
                found.append(results_and_gradients(name, arguments, leaves))
    except RuntimeError as error:
        assert "deterministic implementation" in str(error)  # noqa: PT017
    for again in found[1:]:
        assert_same(again, found[0])


# --- memory


@every_row
def test_a_backward_pass_leaves_nothing_to_the_garbage_collector(name):
    """A graph that stays alive keeps memory, and no CUDA graph can be captured as long as it exists."""
    arguments, leaves = with_leaves(name, "cpu")
    gc.collect()
    gc.disable()
    try:
        given = {key: leaf * 1 for key, leaf in leaves.items()}
        results = [y for y in tensors(CONTRACTS[name].call(**replaced(arguments, given))) if y.requires_grad]
        if results:
            torch.autograd.backward([y.sum() for y in results])
        alive = [weakref.ref(x) for x in given.values()]
        del given, results
        assert not any(x() is not None for x in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_checkpointed(device, name):
    arguments, leaves = with_leaves(name, device)

    def call(**arguments):
        return checkpoint(CONTRACTS[name].call, use_reentrant=False, **arguments)

    expected = results_and_gradients(name, arguments, leaves)
    assert_same(results_and_gradients(name, arguments, leaves, call), expected, exactly=device.type == "cpu")


# --- compilers and registration


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep) if name.endswith("equal rays") else name for name in CONTRACTS]
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_compiles_whole_with_any_size(device, name, backend):
    torch.compiler.reset()
    row = CONTRACTS[name]
    compiled = torch.compile(row.call, fullgraph=True, backend=backend, dynamic=row.any_size)
    for stance, count in (("default", 11), ("fail_on_recompile", 19))[: 1 + row.any_size]:
        arguments, leaves = with_leaves(name, device, count=count)
        expected = results_and_gradients(name, arguments, leaves)
        with torch.compiler.set_stance(stance):
            actual = results_and_gradients(name, arguments, leaves, compiled)
        assert_same(actual, expected, exactly=False)


# Results that are not filled hold anything: they are not compared.
PARTLY_WRITTEN = {"count_ray_samples", "count_visible_samples", "march_to_slots"}


@pytest.mark.parametrize("name", [name for name in CONTRACTS if not name.endswith("equal rays")])  # the same raw calls
def test_opcheck(device, name):
    """Of every raw op that the function calls, and its derivatives; those of no points, samples or rays too."""
    seen = set()
    for count in (8, 0):
        for op, arguments in raw_calls(device, name, count):
            kind = op, count, repr([x if not isinstance(x, (torch.Tensor, list)) else "tensor" for x in arguments])
            if kind in seen:
                continue
            seen.add(kind)
            row, given = TABLE[op], list(arguments)
            # What would be the second derivative of value and gradient at once is refused.
            last = op.startswith("point_gradient") and given[-1]
            if row.derivative in ("formula", "gradients") and count and not last:
                for place, (key, x) in enumerate(zip(row.arguments, given, strict=True)):
                    if row.derivative == "formula" or key in row.differentiable:
                        given[place] = torch.utils._pytree.tree_map_only(torch.Tensor, leaf_of, x)
            checks = {"test_utils": ("test_schema", "test_faketensor")} if op in PARTLY_WRITTEN or not count else {}
            torch.library.opcheck(row.raw, tuple(given), atol=1e-5, rtol=1e-4, **checks)


def leaf_of(x):
    return x.requires_grad_() if x.is_floating_point() else x


# --- derivatives


# These have derivatives of every order and mode, and maps, but for these arguments.
NOTHING_REFUSED = {*SAMPLING, *RAYS} - {"select_samples", "importance_sample"}
REFUSED = {*((name, "points") for name in SAMPLING if "with_gradient" in name)}
REFUSED |= {(name, "ray_offsets") for name in ("sum_along_rays", *(name for name in RAYS if "clusive" in name))}


def refused(name, argument, attempt):
    """Returns whether an attempt is refused by name, and its result otherwise."""
    function = name.partition(",")[0]
    try:
        return False, attempt()
    except RuntimeError as error:
        assert name not in NOTHING_REFUSED or (name, argument) in REFUSED
        blamed = CONTRACTS[name].blamed or f"{function}|derivatives of compositing|sums along rays"
        if not (isinstance(error, NotImplementedError) and re.search(blamed, str(error))):
            raise
        return True, None


def of_argument(name, device, argument):
    """A function of one floating argument that returns all floating results, and the argument's value."""
    row = CONTRACTS[name]
    arguments = row.arguments(device)

    def function(x):
        results = tensors(row.call(**replaced(arguments, {argument: x})))
        return tuple(y for y in results if y.is_floating_point() or not x.is_floating_point())

    return function, named_tensors(arguments)[argument]


def loss_of(function):
    return lambda x: sum(y.double().nan_to_num().square().sum() for y in function(x))


def assert_is_the_slope(tangents, function, x, tangent):
    assert x.dtype == torch.float64, "cannot be compared with differences"
    step = 1e-6
    ahead, behind = (function(x + sign * step * tangent) for sign in (1, -1))
    slopes = [(high - low) / (2 * step) for high, low in zip(ahead, behind, strict=True)]
    for actual, slope in zip(tangents, slopes, strict=True):
        actual = torch.zeros_like(slope) if actual is None else actual
        torch.testing.assert_close(actual, slope.to(actual.dtype), rtol=1e-5, atol=1e-6)
    return any(slope.any() for slope in slopes)


@every_argument
@pytest.mark.parametrize("mode", ["dual numbers", "torch.func"])
def test_forward_mode(device, name, argument, mode):
    function, x = of_argument(name, device, argument)
    tangent = torch.randn_like(x)

    def attempt():
        if mode == "torch.func":
            return torch.func.jvp(function, (x,), (tangent,))[1]
        with forward_ad.dual_level():
            return [forward_ad.unpack_dual(y).tangent for y in function(forward_ad.make_dual(x, tangent))]

    was_refused, actual = refused(name, argument, attempt)
    if not was_refused:
        assert_is_the_slope(actual, function, x, tangent)


@every_argument
def test_torch_func_is_autograd(device, name, argument):
    """Gradients by torch.func, first and second, are those of autograd, or refused where autograd refuses them."""
    function, x = of_argument(name, device, argument)
    loss = loss_of(function)

    def slope(x):
        return torch.func.grad(loss)(x).double().square().sum()

    leaf = x.clone().requires_grad_()
    first = second = torch.zeros_like(leaf)
    if (value := loss(leaf)).requires_grad:
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
    torch.testing.assert_close(torch.func.grad(loss)(x), first.detach())
    value, pull = torch.func.vjp(loss, x)
    torch.testing.assert_close(pull(torch.ones_like(value)), (first.detach(),))
    was_refused, actual = refused(name, argument, lambda: torch.func.grad(slope)(x))
    if was_refused:
        assert refused(name, argument, lambda: torch.autograd.grad(first.double().square().sum(), leaf))[0]
        return
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.double().square().sum(), leaf)
    torch.testing.assert_close(actual, second)


@every_argument
def test_gradients(device, name, argument):
    """A first derivative is right, or results do not require one; a second one is right, or refused."""
    function, x = of_argument(name, device, argument)
    x.requires_grad_()

    def differentiable(x):
        return tuple(y for y in function(x) if y.requires_grad)

    if not (results := differentiable(x)):
        return
    if x.dtype != torch.float64:
        (grad,) = torch.autograd.grad(sum(y.sum() for y in results), x, create_graph=True)
        assert grad.any()
        if grad.requires_grad:  # not that of a linear op
            was_refused, _ = refused(name, argument, lambda: torch.autograd.grad(grad.sum(), x))
            assert was_refused
        return
    nondet = 0.0 if device.type == "cpu" else 1e-10  # CUDA sums in no fixed order
    gradgradcheck = partial(torch.autograd.gradgradcheck, nondet_tol=nondet)
    assert torch.autograd.gradcheck(differentiable, x, nondet_tol=nondet)
    was_refused, right = refused(name, argument, lambda: gradgradcheck(differentiable, x))
    assert was_refused or right

    def forward_over_reverse():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            kept = [i for i, y in enumerate(function(dual)) if y.requires_grad]
        options = {"check_fwd_over_rev": True, "fast_mode": True}
        return gradgradcheck(lambda x: tuple(function(x)[i] for i in kept), x, **options)

    was_refused, right = refused(name, argument, forward_over_reverse)
    assert was_refused or right


@pytest.mark.parametrize(
    "name",
    [
        *("sample_trilinear", "sample_pyramid", "grid_sample", "trilinear_interpolate", "sample_cubic"),
        *("splat_trilinear", "splat_cubic", "grid_sample, image"),
    ],
)
def test_a_third_derivative_of_sampling_is_refused(device, name):
    arguments, leaves = with_leaves(name, device)
    *_, points = leaves.values()
    value = sum(x.square().sum() for x in tensors(CONTRACTS[name].call(**arguments)))
    for _ in range(2):
        (slope,) = torch.autograd.grad(value, points, create_graph=True)
        value = slope.square().sum()
    with pytest.raises(NotImplementedError, match="third derivative"):
        torch.autograd.grad(value, points)


# --- maps


@pytest.fixture
def _no_slow_vmap():
    """Makes torch raise an error where it would map an op by running it once for each call."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def assert_mapped_or_refused(function, x, name, argument, of_no_calls=True):
    for dim in {0, x.dim()}:
        several = torch.stack([x, x * 0.9] if x.is_floating_point() else [x, x], dim=dim)
        mapped = partial(torch.func.vmap(function, dim), several)
        was_refused, actual = refused(name, argument, mapped)
        if was_refused:
            return
        for call, each in enumerate(several.unbind(dim)):
            for one, other in zip(actual, function(each), strict=True):
                torch.testing.assert_close(one[call], other, equal_nan=True)
        assert not of_no_calls or not any(len(y) for y in torch.func.vmap(function, dim)(several.narrow(dim, 0, 0)))


EVERY_TENSOR = [(name, key) for name in CONTRACTS for key in named_tensors(CONTRACTS[name].arguments())]


@pytest.mark.usefixtures("_no_slow_vmap")
@pytest.mark.parametrize(("name", "argument"), EVERY_TENSOR, ids=[f"{n}-{a}" for n, a in EVERY_TENSOR])
def test_vmap(device, name, argument):
    """Also over cells, indices and offsets."""
    function, x = of_argument(name, device, argument)
    assert_mapped_or_refused(function, x, name, argument)


@pytest.mark.usefixtures("_no_slow_vmap")
@every_argument
def test_vmap_of_gradients(device, name, argument):
    function, x = of_argument(name, device, argument)
    assert_mapped_or_refused(lambda x: (torch.func.grad(loss_of(function))(x),), x, name, argument, of_no_calls=False)


@pytest.mark.usefixtures("_no_slow_vmap")
@pytest.mark.parametrize("of_gradients", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if floating(name)])
def test_vmap_over_all_floating_arguments(device, name, of_gradients):
    row = CONTRACTS[name]
    calls = [row.arguments(device) for _ in range(2)]
    given = [{key: x for key, x in named_tensors(call).items() if key in floating(name)} for call in calls]

    def function(several):
        return tuple(tensors(row.call(**replaced(calls[0], several))))

    def gradients(several):
        return tuple(torch.func.grad(loss_of(function))(several).values())

    call = gradients if of_gradients else function
    several = {key: torch.stack([each[key] for each in given], dim=-1) for key in given[0]}
    was_refused, actual = refused(name, None, lambda: torch.func.vmap(call, -1)(several))
    for one, *others in [] if was_refused else zip(actual, *map(call, given), strict=True):
        for mapped, other in zip(one, others, strict=True):
            torch.testing.assert_close(mapped, other, equal_nan=True)
