"""The table of ops: what each raw op needs besides its kernels, declared once, by the names in its schema.

A row is declared beside the public function that calls the op::

    _pixels = declare(
        "pixel_colors",
        results=lambda rgb, rays_per_pixel: rgb.new_empty(rgb.shape[0] // rays_per_pixel, 3),
        gradients=_gradients,
    )
    _pixels_backward = declare("pixel_colors_backward", results=..., refusal="... is differentiable once; ...")

The schema itself is in ``extension/module/library.cpp`` and is read from there; a row adds

- ``results``: a function that returns the results for a compiler, shapes and dtypes without values. It takes the
  arguments that it needs, in any order, by their names in the schema. Ops that return nothing need none.
- the derivative, of one of these kinds (:attr:`Op.derivative`):

  - ``"once"``: ``gradients`` returns the gradients by name, as in ``{"rgb": ...}``. It takes what it needs by name:
    arguments and results of the op, ``needs``, the names of the arguments that require a gradient, and the gradients
    that arrive: ``grad`` if there is one result, else ``grad_NAME`` for the result NAME. ``constants`` names the
    floating-point tensors that get none.
  - ``"last"``: ``refusal`` is the message with which a derivative is refused. Backward ops are such.
  - ``"formula"``: ``formula`` differentiates the op any number of times. It takes all arguments in the order of the
    schema, and applies autograd Functions to them.
  - ``"none"``, without any of these: the op treats all tensors as constants.

- ``batching``: the rule for ``torch.vmap`` and for autograd's batches of gradients; without one, mapping is refused.
- ``public``: the name of the public function, for errors. Without it, that is the name of the op, or of the op of which
  it is the backward.

A row is called with the arguments of the op, in the order of the schema or by name: it loads the kernels and
differentiates as declared in every situation (recorded, ``torch.func``, forward mode, traced by a compiler).
:data:`TABLE` has all rows by name, once :mod:`voxelfield.ops` and the modules in ``_internal`` are imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.foundation.autograd import (
    MaybeTensor,
    OpFunction,
    forward_mode_active,
    hold_constant,
    traces_ops,
)
from voxelfield.foundation.private_torch import (
    add_batch_dim,
    below_autograd,
    functorch_active,
    remove_batch_dim,
)

Rule = Callable[..., tuple[Any, Any]]

# How deeply torch.autograd may nest batched gradients of batched gradients.
_MAX_NESTING = 8

_fragment = torch.library.Library("voxelfield", "FRAGMENT")

TABLE: dict[str, Op] = {}


def declare(
    name: str,
    results: Callable[..., Any] | None = None,
    *,
    gradients: Callable[..., dict[str, Any]] | None = None,
    constants: Sequence[str] = (),
    refusal: str | None = None,
    formula: Callable[..., Any] | None = None,
    batching: Rule | None = None,
    public: str = "",
) -> Op:
    """Adds a row to the table, and registers it as soon as the schemas exist; see the module's docstring."""
    op = TABLE[name] = Op(
        name, public or name.removesuffix("_backward"), results, gradients, constants, refusal, formula, batching
    )
    _library.when_loaded(op.register)
    return op


class Op:
    """One row of the table.

    Attributes:
        name: The name of the raw op, ``torch.ops.voxelfield.NAME``.
        public: The name of the function that users call.
        derivative: ``"once"``, ``"last"``, ``"formula"`` or ``"none"``.
        batching: The batching rule, None if mapping is refused.
        raw: The overload of the raw op, once the library is loaded, as all that follows.
        arguments: The names of all arguments, in the order of the schema.
        tensors: The names of those that are tensors or lists of tensors.
        written: The places of those that the op writes to.
        results: The names of the results, which may be empty.
    """

    def __init__(
        self,
        name: str,
        public: str,
        shapes: Callable[..., Any] | None,
        gradients: Callable[..., dict[str, Any]] | None,
        constants: Sequence[str],
        refusal: str | None,
        formula: Callable[..., Any] | None,
        batching: Rule | None,
    ) -> None:
        self.name, self.public, self.batching = name, public, batching
        self.gradients, self.constants, self.refusal, self.formula = gradients, constants, refusal, formula
        self.derivative = "formula" if formula else "once" if gradients else "last" if refusal else "none"
        self.raw: Any = None
        self.arguments: tuple[str, ...] = ()
        self.tensors: tuple[str, ...] = ()
        self.written: tuple[int, ...] = ()
        self.results: tuple[str, ...] = ()
        self._shapes = shapes
        self._list_at: int | None = None

    def register(self) -> None:
        """Reads the schema, and registers shapes, derivative, batching rule and version counters with torch."""
        self.raw = getattr(torch.ops.voxelfield, self.name).default
        schema = self.raw._schema
        self.arguments = tuple(x.name for x in schema.arguments)
        self.results = tuple(x.name for x in schema.returns)
        self.tensors = tuple(x.name for x in schema.arguments if "Tensor" in str(x.type))
        self.written = tuple(i for i, x in enumerate(schema.arguments) if x.alias_info and x.alias_info.is_write)
        lists = [i for i, x in enumerate(schema.arguments) if str(x.type) == "List[Tensor]"]
        self._list_at = lists[0] if len(lists) == 1 else None
        if self.derivative in ("once", "last"):
            self.formula = self._make_formula()
        if self._shapes is not None:
            torch.library.register_fake(f"voxelfield::{self.name}", self._by_name(self._shapes))
        elif not self.results:
            torch.library.register_fake(f"voxelfield::{self.name}", lambda *_: None)
        if self.formula is not None:
            _fragment.impl(self.name, self._differentiate, "Autograd")
        if self.batching is not None:
            _fragment.impl(self.name, self._map_gradients, "Batched")
        if self.written:
            _fragment.impl(self.name, self._run_and_raise_versions, "ADInplaceOrView")
        torch.library.register_vmap(f"voxelfield::{self.name}", self._map, lib=_fragment)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the op in any situation."""
        _library.ensure_loaded(_device_type((*arguments, *named.values())))
        if named:
            arguments = (*arguments, *[named.pop(name) for name in self.arguments[len(arguments) :]])
            if named:
                raise TypeError(f"{self.name} has no arguments {list(named)}")
        if self.formula is None:
            return self._run_constant(arguments)
        if traces_ops():
            return self.raw(*arguments)
        return self.formula(*arguments)

    def _run_constant(self, arguments: Sequence[Any]) -> Any:
        """Runs an op without derivative; raises if a tensor carries a tangent, or is mapped without a rule for it."""
        if self.written:
            with torch.no_grad():
                return self.raw(*arguments)
        if traces_ops() or forward_mode_active():
            flat = dict(self._named_tensors(arguments))
            constant = dict(zip(flat, hold_constant(self.public, **flat), strict=True))
            return self.raw(*self._with_tensors(arguments, constant))
        with below_autograd():
            return self.raw(*arguments)

    def _named_tensors(self, arguments: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors among the arguments, those in lists as NAME[i]."""
        for name, x in zip(self.arguments, arguments, strict=True):
            if isinstance(x, Tensor):
                yield name, x
            elif isinstance(x, (list, tuple)):
                yield from ((f"{name}[{i}]", each) for i, each in enumerate(x) if isinstance(each, Tensor))

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
        places = [self.arguments.index(name) for name in inspect.signature(function).parameters]
        return lambda *arguments: function(*[arguments[i] for i in places])

    def _make_formula(self) -> Callable[..., Any]:
        """Returns a function of all arguments that applies a Function with the declared gradients, or a refusal."""
        apply, count = _function_of(self).apply, len(self.results)
        held = [self.arguments.index(name) for name in self.constants]

        def formula(*arguments: Any) -> Any:
            inputs = list(arguments)
            for i in held:
                if inputs[i] is not None and inputs[i].requires_grad:
                    inputs[i] = inputs[i].detach()
            if self._list_at is None:
                return apply(*inputs)
            results = apply(*_unpacked(inputs))
            # A Function cannot return a list of tensors; the last result is one if there are more than expected.
            return results if count == 1 else (*results[: count - 1], list(results[count - 1 :]))

        return formula

    def nested(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns the arguments from inputs of a Function, which are tensors, not lists of them."""
        at = self._list_at
        if at is None:
            return inputs
        end = len(inputs) - (len(self.arguments) - at - 1)
        return (*inputs[:at], list(inputs[at:end]), *inputs[end:])

    def _differentiate(self, *arguments: Any) -> Any:
        """Is the autograd kernel of the raw op."""
        # torch.func calls this with one of its levels partly unwound, and then no Function can be applied.
        if functorch_active():
            raise NotImplementedError(
                f"torch.ops.voxelfield.{self.name} cannot be transformed by torch.func (grad, jvp, ...); the functions "
                "in voxelfield.ops can, outside of torch.compile(fullgraph=True)"
            )
        assert self.formula is not None
        return self.formula(*arguments)

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
        tensors = dict(self._named_tensors(arguments))
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
            result = self.raw(*arguments)
        written = [
            x for i in self.written for x in (arguments[i] if isinstance(arguments[i], list) else [arguments[i]])
        ]
        torch.autograd.graph.increment_version([x for x in written if x is not None])
        return result


def _cannot_be_mapped(public: str) -> str:
    return f"{public} cannot be mapped by torch.vmap: call it once with the inputs of all calls"


def _mapped_size(x: Tensor, level: int) -> int | None:
    """Returns the length of the dimension that a level maps over, or None if ``x`` is not mapped at that level."""
    # torch expands a tensor that is not mapped to the size passed in; a mapped tensor keeps its own length.
    one, two = (int(remove_batch_dim(x, level, size, 0).shape[0]) for size in (1, 2))
    return one if one == two else None


def _function_of(op: Op) -> type[OpFunction]:
    """Makes the Function of an op with declared gradients, or with a derivative that is refused."""
    gradients, refusal = op.gradients, op.refusal
    wanted = () if gradients is None else tuple(inspect.signature(gradients).parameters)
    saved = [name for name in wanted if name in op.tensors]
    plain = [name for name in wanted if name in op.arguments and name not in op.tensors]
    kept = [name for name in wanted if name in op.results]
    arriving = ["grad"] if len(op.results) == 1 else [f"grad_{name}" for name in op.results]

    class Declared(OpFunction):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            with below_autograd():
                result = op.raw(*op.nested(inputs))
            return tuple(_unpacked(result)) if isinstance(result, tuple) else result

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            named = dict(zip(op.arguments, op.nested(inputs), strict=True))
            if kept:
                named.update(zip(op.results, output if isinstance(output, tuple) else (output,), strict=True))
            ctx.plain = {name: named[name] for name in plain}
            tensors = [named[name] for name in (*kept, *saved)]
            ctx.lengths = [len(x) if isinstance(x, list) else None for x in tensors]
            ctx.save_for_backward(*_unpacked(tensors))

        @staticmethod
        def backward(ctx: Any, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
            if gradients is None:
                raise NotImplementedError(refusal)
            tensors = iter(ctx.saved_tensors)
            named = {**ctx.plain, **dict(zip(arriving, grads, strict=True))}
            for name, length in zip((*kept, *saved), ctx.lengths, strict=True):
                named[name] = next(tensors) if length is None else [next(tensors) for _ in range(length)]
            needed = dict(zip(op.arguments, op.nested(ctx.needs_input_grad), strict=True))
            named["needs"] = {name for name, need in needed.items() if need is True or (need and any(need))}
            found = gradients(*[named[name] for name in wanted])
            absent = {name: [None] * len(need) if isinstance(need, list) else None for name, need in needed.items()}
            return tuple(_unpacked((absent | found).values()))

        @staticmethod
        def jvp(ctx: Any, *tangents: MaybeTensor) -> None:
            raise NotImplementedError(
                refusal or f"{op.public} has no forward-mode derivative: differentiate in reverse mode"
            )

        @staticmethod
        def vmap(*_: object) -> None:
            raise NotImplementedError(_cannot_be_mapped(op.public))

    return Declared


def _device_type(values: Iterable[Any]) -> str:
    """Returns the type of the device of the first tensor."""
    for x in values:
        first = x[0] if isinstance(x, (list, tuple)) and x else x
        if isinstance(first, Tensor):
            return first.device.type
    return "cpu"


def _unpacked(values: Iterable[Any]) -> Iterator[Any]:
    """Yields values, and those of lists one by one."""
    for x in values:
        yield from x if isinstance(x, (list, tuple)) else (x,)
