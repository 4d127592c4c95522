"""The table of ops: what each raw op needs besides its kernels, declared once, by the names in its schema.

A row is declared beside the public function that calls the op::

    _pixels = declare(
        "pixel_colors",
        results=lambda rgb, rays_per_pixel: rgb.new_empty(rgb.shape[0] // rays_per_pixel, 3),
        gradients=_gradients,
        differentiable=("rgb", "opacity", "background"),
    )
    _pixels_backward = declare("pixel_colors_backward", results=..., refusal="... is differentiable once; ...")

The schema itself is in ``extension/module/library.cpp`` and is read from there; a row adds

- ``results``: a function that returns the results for a compiler, shapes and dtypes without values. It takes the
  arguments that it needs, in any order, by their names in the schema. Ops that return nothing need none.
- ``check``: a function that takes arguments by name too, and raises unless they fit. Kernels check their arguments
  themselves, in C++. This check is for calls that do not reach a kernel as they are: those of tensors without values,
  and those under ``torch.func`` and forward mode.
- the derivative, of one of these kinds (:attr:`Op.derivative`):

  - ``"gradients"``: ``gradients`` returns gradients by the names of arguments, as in ``{"rgb": ...}``, and
    ``differentiable`` names all arguments that can get one. Its parameters are arguments of the op, or
    ``**arguments`` for all of them, its results, and the gradients that arrive: ``grad`` if the only result has no
    name, else ``grad_NAME`` for the result NAME. ``needs`` is the set of the arguments that require a gradient.
    ``backward`` is a function that runs the op NAME_backward on what the schema of that op names, and on what it is
    passed by name; it returns gradients by name too.
  - ``"last"``: ``refusal`` is the message with which a derivative is refused. Backward ops are such.
  - ``"function"``: ``function`` is an autograd Function that differentiates the op, any number of times. It is applied
    to all arguments in the order of the schema, or to what ``inputs`` makes of them; ``unpack`` makes the results of
    the op from its results.
  - ``"none"``, without any of these: the op treats all tensors as constants.

- ``batching``: the rule for ``torch.vmap`` and for autograd's batches of gradients; without one, mapping is refused.
- ``public``: the name of the public function, for errors. Without it, that is the name of the op, or of the op of which
  it is the backward.

A row is called with the arguments of the op, in the order of the schema or by name (:meth:`Op.by_name`): it loads the
kernels, differentiates as declared in every situation (recorded, ``torch.func``, forward mode, traced by a compiler),
and turns errors of C++ into those of Python.
:data:`TABLE` has all rows by name, once :mod:`voxelfield.ops` and the modules in ``_internal`` are imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import compress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.jit import is_tracing

from voxelfield import _library
from voxelfield.foundation.autograd import MaybeTensor, OpFunction, hold_constant, to_record
from voxelfield.foundation.checks import check_same_device
from voxelfield.foundation.private_torch import (
    add_batch_dim,
    below_autograd,
    forward_mode_level,
    functorch_active,
    kernel_of,
    remove_batch_dim,
)
from voxelfield.ops._errors import explain

Rule = Callable[..., tuple[Any, Any]]

# How deeply torch.autograd may nest batched gradients of batched gradients.
_MAX_NESTING = 8

_fragment = torch.library.Library("voxelfield", "FRAGMENT")

TABLE: dict[str, Op] = {}


def declare(name: str, results: Callable[..., Any] | None = None, **row: Any) -> Op:
    """Adds a row to the table, with the fields of :class:`Op`, and registers it as soon as the schemas exist."""
    op = TABLE[name] = Op(name, results, **{"public": name.removesuffix("_backward")} | row)
    _library.when_loaded(op.register)
    return op


def _run_unloaded(*_: Any) -> None:
    raise RuntimeError("the kernels of an op must be loaded before it runs")


@dataclass(eq=False)
class Op:
    """One row of the table; the module's docstring has its first fields, which a declaration sets.

    The others are set once the library is loaded.

    Attributes:
        raw: The overload of the raw op, ``torch.ops.voxelfield.NAME.default``.
        kernel: The same for eager calls, which takes less time on the host.
        derivative: Its kind: ``"gradients"``, ``"last"``, ``"function"`` or ``"none"``.
        arguments: The names of all arguments, in the order of the schema.
        tensors: The names of those that are tensors or lists of tensors.
        written: The places of those that the op writes to.
        outputs: The names of the results, which may be empty.
    """

    name: str
    results: Callable[..., Any] | None = None
    _: KW_ONLY
    check: Callable[..., None] | None = None
    gradients: Callable[..., dict[str, Any]] | None = None
    differentiable: Sequence[str] = ()
    refusal: str | None = None
    function: type[OpFunction] | None = None
    inputs: Callable[..., Sequence[Any]] | None = None
    unpack: Callable[[Any], Any] | None = None
    batching: Rule | None = None
    public: str = ""

    raw: Any = field(default=_run_unloaded, init=False)
    kernel: Callable[..., Any] = field(default=_run_unloaded, init=False)
    arguments: tuple[str, ...] = field(default=(), init=False)
    tensors: tuple[str, ...] = field(default=(), init=False)
    written: tuple[int, ...] = field(default=(), init=False)
    outputs: tuple[str, ...] = field(default=(), init=False)
    _kinds: tuple[str, ...] = field(default=(), init=False)
    _apply: Callable[..., Any] | None = field(default=None, init=False)
    _check: Callable[..., None] | None = field(default=None, init=False)

    derivative: str = field(default="none", init=False)

    def __post_init__(self) -> None:
        kinds = {"function": self.function, "gradients": self.gradients, "last": self.refusal, "none": True}
        self.derivative = next(kind for kind, given in kinds.items() if given is not None)

    def register(self) -> None:
        """Reads the schema, and registers shapes, derivative, batching rule and version counters with torch."""
        self.raw = getattr(torch.ops.voxelfield, self.name).default
        self.kernel, schema = kernel_of(self.raw), self.raw._schema
        self.arguments = tuple(x.name for x in schema.arguments)
        self.outputs = tuple(x.name for x in schema.returns)
        self._kinds = tuple(str(x.type) for x in schema.arguments)
        self.tensors = tuple(name for name, kind in zip(self.arguments, self._kinds, strict=True) if "Tensor" in kind)
        self.written = tuple(i for i, x in enumerate(schema.arguments) if x.alias_info and x.alias_info.is_write)
        self._check = None if self.check is None else self._by_name(self.check)
        if self.derivative in ("gradients", "last"):
            _make_function(self)
        if self.function is not None:
            self._apply = self._of_arguments(self.function.apply)
        if self.results is not None:
            torch.library.register_fake(f"voxelfield::{self.name}", self._make_fake(self.results))
        elif not self.outputs:
            torch.library.register_fake(f"voxelfield::{self.name}", lambda *_: None)
        if self._apply is not None:
            _fragment.impl(self.name, self._differentiate, "Autograd")
        if self.batching is not None:
            _fragment.impl(self.name, self._map_gradients, "Batched")
        if self.written:
            _fragment.impl(self.name, self._run_and_raise_versions, "ADInplaceOrView")
        torch.library.register_vmap(f"voxelfield::{self.name}", self._map, lib=_fragment)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the op in any situation."""
        try:
            if is_compiling() or is_tracing():
                return self._run_transformed(arguments, traced=True)
            if functorch_active() or forward_mode_level() >= 0:
                return self._run_transformed(arguments, traced=False)
            if self.function is not None and is_grad_enabled():
                inputs = arguments if self.inputs is None else self.inputs(*arguments)
                if (recorded := to_record(inputs)) is not None:
                    result = self.function.record(*recorded)
                    return result if self.unpack is None else self.unpack(result)
            elif self.written:
                return self._run_and_raise_versions(*arguments)
            with below_autograd():
                return self.kernel(*arguments)
        except RuntimeError as error:
            # To ask before every call whether the kernels for its device are loaded would take longer.
            if not _serve(arguments):
                explain(error, zip(self.arguments, self._kinds, arguments, strict=True), self._named_tensors(arguments))
                raise
        return self(*arguments)

    def by_name(self, **arguments: Any) -> Any:
        """Runs the op with all of its arguments, given by their names in the schema."""
        if not self.arguments:
            _library.ensure_loaded(_device(arguments.values()).type)
        if differing := arguments.keys() ^ {*self.arguments}:
            raise TypeError(f"{self.public} takes {', '.join(self.arguments)}, which differ in {', '.join(differing)}")
        return self(*[arguments[name] for name in self.arguments])

    def _run_transformed(self, arguments: Sequence[Any], traced: bool) -> Any:
        """Runs the op in a trace, under ``torch.func``, or while tensors may carry tangents."""
        _library.ensure_loaded(_device(arguments).type)
        if self.written:
            with torch.no_grad():
                return self.raw(*arguments)
        if self._check is not None and not traced:
            self._check(*arguments)
        # A trace can contain the raw op, where an autograd Function would hide it.
        run = self.raw if traced or self._apply is None else self._apply
        return run(*self._with_constants(arguments))

    def _with_constants(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Detaches tensors that get no gradient; raises if one of them carries a tangent or is mapped."""
        if self.derivative in ("function", "last"):
            return arguments
        tensors = self._named_tensors(arguments)
        flat = {name: x for name, x in tensors.items() if name.split("[")[0] not in self.differentiable}
        return self._with_tensors(arguments, dict(zip(flat, hold_constant(self.public, **flat), strict=True)))

    def _named_tensors(self, arguments: Sequence[Any]) -> dict[str, Tensor]:
        """Returns the tensors among the arguments, those in lists as NAME[i]."""
        named: dict[str, Any] = {}
        for name, x in zip(self.arguments, arguments, strict=True):
            if isinstance(x, (list, tuple)):
                named |= {f"{name}[{i}]": each for i, each in enumerate(x)}
            else:
                named[name] = x
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def _with_tensors(self, arguments: Sequence[Any], tensors: dict[str, Tensor]) -> list[Any]:
        """Returns the arguments with some tensors replaced, whose names are those of :meth:`_named_tensors`."""
        return [
            [tensors.get(f"{name}[{i}]", each) for i, each in enumerate(x)]
            if isinstance(x, (list, tuple))
            else tensors.get(name, x)
            for name, x in zip(self.arguments, arguments, strict=True)
        ]

    def _by_name(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of all arguments that passes on those that ``function`` has a parameter for."""
        parameters = inspect.signature(function).parameters.values()
        names = [x.name for x in parameters if x.name in self.arguments or x.default is x.empty]
        places = [(name, self.arguments.index(name)) for name in names]
        return lambda *arguments: function(**{name: arguments[i] for name, i in places})

    def _make_fake(self, results: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the kernel for tensors without values."""
        named_results = self._by_name(results)

        def fake(*arguments: Any) -> Any:
            if self._check is not None:
                self._check(*arguments)
            (first, like), *others = self._named_tensors(arguments).items()
            for name, x in others:
                check_same_device(name, x, first, like)
            return named_results(*arguments)

        return fake

    def _of_arguments(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of all arguments that applies the Function by ``run``."""
        inputs, unpack = self.inputs, self.unpack
        applied = run if inputs is None else lambda *arguments: run(*inputs(*arguments))
        return applied if unpack is None else lambda *arguments: unpack(applied(*arguments))

    def _differentiate(self, *arguments: Any) -> Any:
        """Is the autograd kernel of the raw op."""
        # torch.func calls this with one of its levels partly unwound, and then no Function can be applied.
        if functorch_active():
            raise NotImplementedError(
                f"torch.ops.voxelfield.{self.name} cannot be transformed by torch.func (grad, jvp, ...); the functions "
                "in voxelfield.ops can, outside of torch.compile(fullgraph=True)"
            )
        return self.differentiate(*arguments)

    def differentiate(self, *arguments: Any) -> Any:
        """Runs an op that has a derivative, which a backward pass calls, on kernels that are loaded."""
        if not torch.is_grad_enabled() and not functorch_active() and forward_mode_level() < 0:
            with below_autograd():
                return self.kernel(*arguments)
        assert self._apply is not None
        return self._apply(*arguments)

    def _map(self, info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Applies the batching rule. Without one, torch would run the op once for each call."""
        if self.batching is None:
            raise NotImplementedError(_cannot_be_mapped(self.public))
        return self.batching(info, dims, *arguments)

    def _map_gradients(self, *arguments: Any) -> Any:
        """Applies the batching rule for autograd's own batches of gradients, which use an older mechanism of torch.

        These are ``torch.autograd.grad(..., is_grads_batched=True)`` and
        ``torch.autograd.functional.jacobian(..., vectorize=True)``.
        """
        tensors = self._named_tensors(arguments)
        # Search from the innermost level. The current level is not known here: on CUDA this runs in autograd's device
        # thread, while torch counts levels in the thread that started the backward pass.
        for level in range(_MAX_NESTING, 0, -1):
            sizes = {name: size for name, x in tensors.items() if (size := _mapped_size(x, level)) is not None}
            if sizes:
                break
        else:
            raise RuntimeError(
                f"torch.ops.voxelfield.{self.name} was asked to map over a dimension that no argument has"
            )
        size = next(iter(sizes.values()))
        plain = {name: remove_batch_dim(tensors[name], level, size, 0) for name in sizes}
        dims = [
            [0 if f"{name}[{i}]" in sizes else None for i in range(len(x))]
            if isinstance(x, (list, tuple))
            else (0 if name in sizes else None)
            for name, x in zip(self.arguments, arguments, strict=True)
        ]
        info = SimpleNamespace(batch_size=size)
        assert self.batching is not None
        result, result_dims = self.batching(info, tuple(dims), *self._with_tensors(arguments, plain))
        if isinstance(result, Tensor):
            return add_batch_dim(result, result_dims, level)
        return [add_batch_dim(x, dim, level) for x, dim in zip(result, result_dims, strict=True)]

    def _run_and_raise_versions(self, *arguments: Any) -> Any:
        """Runs the op, and raises the version counters of tensors that it writes to, as torch does for its own ops.

        Otherwise autograd would compute wrong gradients in silence from tensors that an op has overwritten since.
        """
        with below_autograd():
            result = self.kernel(*arguments)
        written = [
            x for i in self.written for x in (arguments[i] if isinstance(arguments[i], list) else [arguments[i]])
        ]
        torch.autograd.graph.increment_version([x for x in written if x is not None])
        return result


def run_raw(name: str) -> staticmethod[..., Any]:
    """Returns a ``forward`` for an autograd Function of the arguments of an op: it runs the op."""

    def forward(*inputs: Any) -> Any:
        with below_autograd():
            return TABLE[name].kernel(*inputs)

    return staticmethod(forward)


def _cannot_be_mapped(public: str) -> str:
    return f"{public} cannot be mapped by torch.vmap: call it once with the inputs of all calls"


def _mapped_size(x: Tensor, level: int) -> int | None:
    """Returns the length of the dimension that a level maps over, or None if ``x`` is not mapped at that level."""
    # torch expands a tensor that is not mapped to the size passed in; a mapped tensor keeps its own length.
    one, two = (int(remove_batch_dim(x, level, size, 0).shape[0]) for size in (1, 2))
    return one if one == two else None


def _make_function(op: Op) -> None:
    """Gives an op with declared gradients, or with a derivative that is refused, its Function.

    The inputs of the Function are the arguments of the op, the tensors of a list one by one and last.
    """
    gradients, refusal, arguments = op.gradients, op.refusal, op.arguments
    lists = [name for name, kind in zip(arguments, op._kinds, strict=True) if kind == "List[Tensor]"]
    at = arguments.index(lists[0]) if lists else len(arguments)
    single = [*arguments[:at], *arguments[at + 1 :]]
    count = len(single)
    constants = set(op.tensors).difference(op.differentiable) if op.derivative == "gradients" else set()
    held = [i for i, name in enumerate(arguments) if name in constants]

    # What a backward pass reads: numbers, stored tensors, stored results, gradients that arrive, and the list.
    read = set() if gradients is None else {*inspect.signature(gradients).parameters}
    if "arguments" in read:
        read = read - {"arguments"} | {*arguments}
    parameters = read - {"backward", "needs"}
    backward_reads: list[str] = []
    found_names: list[str] = []
    if "backward" in read:
        schema = getattr(torch.ops.voxelfield, f"{op.name}_backward").default._schema
        backward_reads = [x.name for x in schema.arguments]
        found_names = [x.name.removeprefix("grad_") for x in schema.returns]
        read |= {*backward_reads}
    stored = [i for i, name in enumerate(single) if name in read and name in op.tensors]
    numbers = [i for i, name in enumerate(single) if name in read and name not in op.tensors]
    results = [i for i, name in enumerate(op.outputs) if name in read]
    keeps_list = lists[:1] if read.intersection(lists) else []
    arriving = [f"grad_{name}" if name else "grad" for name in op.outputs]
    names = [single[i] for i in (*numbers, *stored)] + [op.outputs[i] for i in results] + arriving + keeps_list
    places = {name: i for i, name in enumerate(names)}
    tensors = len(stored) + len(results)
    saves_inputs = gradients is not None and tensors == count and not results and keeps_list == lists

    def run_backward(values: Sequence[Any], **more: Any) -> dict[str, Any]:
        arguments = [more[name] if name in more else values[places[name]] for name in backward_reads]
        found = TABLE[f"{op.name}_backward"].differentiate(*arguments)
        return dict(zip(found_names, found if isinstance(found, tuple) else (found,), strict=True))

    # A Function cannot return a list of tensors, which follows this many results of an op that takes one.
    fixed = len(op.outputs) - 1

    class Declared(OpFunction):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            with below_autograd():
                if not lists:
                    return op.kernel(*inputs)
                result = op.kernel(*inputs[:at], inputs[count:], *inputs[at:count])
            return (*result[:-1], *result[-1]) if isinstance(result, tuple) and fixed > 0 else result

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if saves_inputs:
                ctx.numbers = ()
                ctx.save_for_backward(*inputs)
            elif gradients is not None:
                ctx.numbers = [inputs[i] for i in numbers]
                outputs = output if isinstance(output, tuple) else (output,)
                kept = inputs[count:] if keeps_list else ()
                ctx.save_for_backward(*[inputs[i] for i in stored], *[outputs[i] for i in results], *kept)

        @staticmethod
        def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
            if gradients is None:
                raise NotImplementedError(refusal)
            saved, needs = ctx.saved_tensors, ctx.needs_input_grad
            values = (*ctx.numbers, *saved[:tensors], *grads, saved[tensors:])
            passed: dict[str, Any] = {name: values[places[name]] for name in parameters}
            if "needs" in read:
                passed["needs"] = {*compress(single, needs), *(lists if any(needs[count:]) else [])}
            if backward_reads:
                # Not in ``passed``: a cycle would keep the graph alive, and with it streams that no CUDA graph may wait
                # for.
                passed["backward"] = partial(run_backward, values)
            found = gradients(**passed)
            of_list = found.get(lists[0]) if lists else None
            return (*[found.get(name) for name in single], *(of_list or [None] * (len(needs) - count)))

        @staticmethod
        def jvp(ctx: Any, *tangents: MaybeTensor) -> None:
            raise NotImplementedError(
                refusal or f"{op.public} has no forward-mode derivative: differentiate in reverse mode"
            )

        @staticmethod
        def vmap(*_: object) -> None:
            raise NotImplementedError(_cannot_be_mapped(op.public))

    def inputs(*values: Any) -> tuple[Any, ...]:
        for i in held:
            if isinstance(values[i], Tensor) and values[i].requires_grad:
                values = (*values[:i], values[i].detach(), *values[i + 1 :])
        return (*values[:at], *values[at + 1 :], *values[at]) if lists else values

    op.function = Declared
    op.inputs = inputs if held or lists else None
    op.unpack = (lambda found: (*found[:fixed], [*found[fixed:]])) if lists and fixed > 0 else None


_served: set[torch.device] = set()


def _serve(arguments: Iterable[Any]) -> bool:
    """Loads the kernels for the device of the first tensor; returns whether that was not done before."""
    device = _device(arguments)
    if device in _served:
        return False
    _library.ensure_loaded(device.type)
    _served.add(device)
    return True


def _device(values: Iterable[Any]) -> torch.device:
    """Returns the device of the first tensor."""
    for x in values:
        first = x[0] if isinstance(x, (list, tuple)) and x else x
        if isinstance(first, Tensor):
            return first.device
    return torch.device("cpu")
