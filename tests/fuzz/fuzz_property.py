"""The property that is tested: a right result, or a refusal in one line that names an argument."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz_values import others_unchanged
from hypothesis import strategies as st
from tolerances import assert_matches
from torch import Tensor

tally: dict[str, Counter[str]] = defaultdict(Counter)
"""For each subject, how often each outcome was seen in this process."""

REFUSALS = (TypeError, ValueError, NotImplementedError, IndexError, OSError, torch.OutOfMemoryError)
"""What may refuse an argument. AssertionError, AttributeError, KeyError or a bare RuntimeError are none."""

# Beyond this, float32 is too coarse for a comparison with float64, and products overflow.
_LARGE = 1e4


def _flat(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, Tensor):
        return (result,)
    return tuple(x for x in result if isinstance(x, Tensor))


def assert_all_match(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Fails unless tensors are their float64 references, up to rounding."""
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.is_floating_point():
            assert_matches(a.detach().cpu(), e.detach(), f"result {index}")
        else:
            assert torch.equal(a.cpu().double(), e.double()), f"result {index}: {a}, not {e}"


def same_integers(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Fails unless tensors are their references, dtypes included."""
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.cpu(), e), f"{a}, not {e}"
        assert a.dtype == e.dtype


@dataclass(frozen=True)
class Subject:
    """A function or a class to try.

    Attributes:
        call: Is called with the arguments by name.
        arguments: Strategy for arguments that are right, on any device.
        reference: Computes the results from the same arguments, all floating-point tensors as float64 on the CPU.
        trained: The arguments that gradients are compared for.
        factors: By what a trained argument is multiplied: as large are terms of its gradient, which may cancel.
        compare: Raises AssertionError unless results fit those of the reference.
        check_extreme: Raises AssertionError unless results fit arguments that are not finite or extreme.
        extreme: The arguments that such numbers are put into.
        rows: The arguments whose rows belong to the rows of the results: an extreme row must not change others.
        names: What a refusal may name beside the arguments.
    """

    call: Callable[..., Any]
    arguments: st.SearchStrategy[dict[str, Any]]
    reference: Callable[..., Any]
    trained: tuple[str, ...] = ()
    factors: Mapping[str, str] = field(default_factory=dict)
    compare: Callable[[dict[str, Any], Sequence[Tensor], Sequence[Tensor]], None] = assert_all_match
    check_extreme: Callable[[dict[str, Any], tuple[Tensor, ...]], None] | None = None
    extreme: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def by_row(
    call: Callable[..., Any],
    arguments: st.SearchStrategy[dict[str, Any]],
    reference: Callable[..., Any],
    extreme: tuple[str, ...],
    **more: Any,
) -> Subject:
    """A subject with a row of results for each of ``extreme``: an extreme row changes no other one."""
    return Subject(call, arguments, reference, check_extreme=others_unchanged(call, extreme), extreme=extreme, **more)


def assert_refusal(error: BaseException, names: Iterable[str]) -> None:
    """Fails unless an exception is a refusal as CONTRIBUTING.md has it: one line that names what is wrong."""
    text = str(error)
    if not isinstance(error, REFUSALS):
        raise AssertionError(f"{type(error).__name__} is no refusal: {text}") from error
    found = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)
    if not text.strip() or "\n" in text or not found:
        raise AssertionError(
            f"{type(error).__name__} must be one line that names one of {sorted(names)}, got {text!r}"
        ) from error


def attempt(name: str, call: Callable[[], Any], names: Iterable[str]) -> Any:
    """Returns what a call returns, or None where it refuses; fails where it does anything else."""
    try:
        result = call()
    except Exception as error:
        assert_refusal(error, names)
        tally[name]["refused"] += 1
        return None
    return result


def doubles(value: Any) -> Any:
    """Returns arguments as a reference takes them: on the CPU, floating-point tensors as float64."""
    if isinstance(value, dict):
        return {name: doubles(item) for name, item in value.items()}
    if isinstance(value, list):
        return [doubles(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    plain = value.detach().cpu().resolve_neg().clone()
    return plain.double() if plain.is_floating_point() else plain


def tensors_of(arguments: dict[str, Any], names: Iterable[str]) -> list[Tensor]:
    """Returns the tensors among some arguments, those in lists too."""
    found = []
    for name in names:
        value = arguments.get(name)
        found += [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]
    return found


def _moderate(x: Tensor) -> Tensor:
    # As float64, because torch compares no numbers of 8 bits.
    return x.double().abs() <= _LARGE if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)


def is_moderate(arguments: dict[str, Any]) -> bool:
    """Tells whether all numbers are finite and of a size at which float32 can be compared with float64."""
    for x in tensors_of(arguments, arguments):
        if x.is_meta or x.is_complex() or not bool(_moderate(x).all()):
            return False
    plain = [x for x in arguments.values() if isinstance(x, (int, float)) and not isinstance(x, bool)]
    return all(abs(x) <= _LARGE for x in plain)


def try_right(name: str, subject: Subject, arguments: dict[str, Any], with_gradients: bool) -> None:
    """Fails unless a call with arguments that are right gives what the reference gives, gradients included."""
    tally[name]["values compared"] += 1
    plain = doubles(arguments)
    if not with_gradients or not subject.trained:
        subject.compare(arguments, _flat(subject.call(**arguments)), _flat(subject.reference(**plain)))
        return
    arguments, plain = _leaves(arguments, subject.trained), _leaves(plain, subject.trained)
    actual, expected = _flat(subject.call(**arguments)), _flat(subject.reference(**plain))
    subject.compare(arguments, actual, expected)
    inputs, plain_inputs = (tensors_of(each, subject.trained) for each in (arguments, plain))
    grads, wanted = _gradients(actual, inputs), _gradients(expected, plain_inputs)
    names = [trained for trained in subject.trained for _ in tensors_of(plain, [trained])]
    for trained, grad, want in zip(names, grads, wanted, strict=True):
        factors = tensors_of(plain, [subject.factors.get(trained, "")])
        largest = max([1.0, *(float(x.detach().abs().max()) for x in factors if x.numel())])
        scale = 2.0 ** math.ceil(math.log2(largest))  # exact in every dtype
        assert_matches(grad.cpu() / scale, want.double() / scale, f"gradient of {trained}")
    tally[name]["gradients compared"] += 1


def _leaves(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    def leaf(value: Any) -> Any:
        if isinstance(value, list):
            return [leaf(x) for x in value]
        if not isinstance(value, Tensor):
            return value
        return (value.clone() if value.is_inference() else value.detach()).requires_grad_()

    def normal(value: Any) -> Any:  # torch saves no inference tensor for a backward pass
        return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

    return {name: leaf(value) if name in names else normal(value) for name, value in arguments.items()}


def _gradients(results: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Derivatives of a weighted sum of all results, whose weights are exact in every dtype."""
    total: Any = 0.0
    for result in results:
        if result.requires_grad:
            weights = (torch.arange(result.numel(), device=result.device) % 7 - 3).to(result.dtype) / 4
            total = total + (result.flatten() * weights).double().sum()
    if not isinstance(total, Tensor):
        return [torch.zeros_like(x) for x in inputs]
    grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def check_extremes(name: str, subject: Subject, arguments: dict[str, Any], result: tuple[Tensor, ...]) -> None:
    """Fails unless the same call gives the same result, whose rows of moderate numbers are those of the reference."""
    if any(x.is_meta for x in result):
        return  # there are no values
    for first, second in zip(result, _flat(subject.call(**arguments)), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    if subject.check_extreme is not None:
        subject.check_extreme(arguments, result)
    tally[name]["extreme values survived"] += 1
    rows = {name: arguments[name] for name in subject.rows}
    if not rows or not is_moderate({name: x for name, x in arguments.items() if name not in rows}):
        return
    if any(not isinstance(x, Tensor) or x.dim() == 0 or len(x) != len(result[0]) or len(x) == 0 for x in rows.values()):
        return
    kept = torch.stack([_moderate(x).reshape(len(x), -1).all(1) for x in rows.values()]).all(0)
    some = arguments | {name: x[kept] for name, x in rows.items()}
    subject.compare(some, tuple(x[kept] for x in result), _flat(subject.reference(**doubles(some))))
    tally[name]["other rows compared"] += int(kept.sum()) < len(kept)


def try_extreme(name: str, subject: Subject, arguments: dict[str, Any]) -> None:
    """Fails unless numbers that are not finite or extreme are refused, or give what is promised for them."""
    result = attempt(name, lambda: subject.call(**arguments), (*arguments, *subject.names))
    if result is not None:
        check_extremes(name, subject, arguments, _flat(result))


def try_broken(name: str, subject: Subject, arguments: dict[str, Any]) -> None:
    """Fails unless a call with one argument that is broken is refused, or is right after all."""
    result = attempt(name, lambda: subject.call(**arguments), (*arguments, *subject.names))
    if result is None:
        return
    if not is_moderate(arguments):
        check_extremes(name, subject, arguments, _flat(result))
        return
    subject.compare(arguments, _flat(result), _flat(subject.reference(**doubles(arguments))))
    tally[name]["values compared"] += 1
