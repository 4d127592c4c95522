"""The processes that train together: their number, this process's rank, and collective calls.

They are torch.distributed's default process group, which ``devices=N``, torchrun, SLURM or a user's script has made.
Without a group there is one process, and nothing here communicates.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

from voxelfield.messages import clipped

P = ParamSpec("P")
T = TypeVar("T")

SLAB_ELEMENTS = 1 << 24
"""Elements of a temporary tensor, 64 MiB of float32: larger tensors are exchanged or resampled a few rows at a time."""


def count() -> int:
    """Returns the number of processes, 1 without a process group."""
    return distributed.get_world_size() if _has_group() else 1


def rank() -> int:
    """Returns this process's rank, from 0."""
    return distributed.get_rank() if _has_group() else 0


def is_first() -> bool:
    """Returns whether this process is the one that logs and writes files."""
    return rank() == 0


def rows(total: int, process: int | None = None) -> slice:
    """Returns the slice of ``total`` rows that belongs to a process, by default to this one.

    The slices follow each other, and their lengths differ by one row at most.
    """
    number, processes = rank() if process is None else process, count()
    return slice(total * number // processes, total * (number + 1) // processes)


def gather_later(out: Tensor, local: Tensor, group: Any = None) -> Callable[[], object]:
    """Begins to write the tensors of all processes, of one size, into a contiguous one, in the order of ranks.

    A collective call on the tensors' device. ``local`` may be this process's slice of ``out``. The result waits; it
    must be called before ``out`` is read, and before ``local`` is changed.
    """
    # Gloo must not read from the memory to which it writes.
    sent = local.reshape(-1) if local.is_cuda else local.flatten().clone()
    # Torch 2.13 has renamed it, and warns of the earlier name.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    wait: Callable[[], object] = gather(out.view(-1), sent, group=group, async_op=True).wait
    return wait


def gather_rows(local: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the rows of all processes, in the order of ranks, to each of them; a collective call on their device.

    Each process gives its rows (R, ...), and the number of rows of each process.
    """
    longest = max(counts)
    sent = local.contiguous()
    if longest > len(local):
        sent = torch.cat((sent, sent.new_empty(longest - len(local), *local.shape[1:])))
    received = local.new_empty(len(counts) * longest, *local.shape[1:])
    gather_later(received, sent)()
    if min(counts) == longest:
        return received
    return torch.cat([rows[:size] for rows, size in zip(received.split(longest), counts, strict=True)])


def sum_of(values: Tensor) -> Tensor:
    """Returns the sum of a tensor over all processes, which is the same in each of them; a collective call."""
    return values if count() == 1 else sum_later(values.clone())()


def sum_later(values: Tensor) -> Callable[[], Tensor]:
    """Begins to sum a contiguous tensor over all processes; the returned function waits, and returns the sum.

    A collective call. The device can do other work meanwhile; ``values`` becomes the sum.
    """
    if count() == 1:
        return lambda: values
    work = distributed.all_reduce(values, async_op=True)

    def arrive() -> Tensor:
        work.wait()
        return values

    return arrive


def broadcast(values: Tensor) -> Tensor:
    """Returns the tensor of process 0, given one of the same shape in each; a collective call."""
    copied = values.clone()
    distributed.broadcast(copied, 0)
    return copied


def gather_objects(value: Any) -> list[Any]:
    """Returns the values of all processes, in the order of ranks, to each of them; they are pickled.

    A collective call: each process must make it, in the same order among all collective calls.
    """
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    distributed.all_gather_object(values, value, group=_hosts())
    return values


def check_alike(values: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises ValueError, whose message names the key, if the values of processes, by rank, are not the same in all."""
    first = min(values)
    for process, other in values.items():
        for key in {**values[first], **other}:
            wanted, found = values[first].get(key), other.get(key)
            if wanted != found:
                got = f"{clipped(str(wanted))} in process {first} and {clipped(str(found))} in process {process}"
                raise ValueError(f"{key} must be the same in all processes, got {got}")


def gather_results(call: Callable[[], T]) -> list[T]:
    """Returns the results of a function in all processes, in the order of ranks, to each of them.

    A collective call, but the function may fail in some processes alone.

    Raises:
        BaseException: The error of the first process in which the function failed, in all of them.
    """
    if count() == 1:
        return [call()]
    local: T | BaseException
    try:
        local = call()
    except (Exception, KeyboardInterrupt) as error:  # without an answer, the others would wait for this process
        local = error
    results = gather_objects(local)
    results[rank()] = local  # not its pickled copy: with the traceback
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def concatenated(call: Callable[[], Sequence[T]]) -> list[T]:
    """Returns the values that a function returns in all processes, one after the other, as :func:`gather_results`."""
    return [value for values in gather_results(call) for value in values]


def gather_to_first(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors of all processes, in the order of ranks, to process 0, and nothing to the others.

    A collective call. The tensors, of one shape and dtype, are on the devices of the processes and stay there.
    """
    if count() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor) for _ in range(count())] if is_first() else None
    distributed.gather(tensor.contiguous(), tensors)
    return tensors or []


def gather_counts(local: int) -> list[int]:
    """Returns a number of each process, in the order of ranks; a collective call that does not wait for the device."""
    if count() == 1:
        return [local]
    counts = torch.empty(count(), dtype=torch.int64)
    gather_later(counts, torch.tensor([local]), _hosts())()
    return counts.tolist()


def row_counts(local: Tensor) -> list[int]:
    """Returns the number of rows of each process's tensor; a collective call that does not wait for the device.

    While a CUDA graph is captured, which cannot depend on the host, all processes must have the same number.
    """
    if local.is_cuda and torch.cuda.is_current_stream_capturing():
        return [len(local)] * count()
    return gather_counts(len(local))


def any_of(flag: bool) -> bool:
    """Returns whether a flag is set in any process; a collective call that does not wait for the device."""
    return any(gather_counts(int(flag)))


def barrier() -> None:
    """Waits until all processes have reached this call."""
    if count() > 1:
        distributed.barrier(group=_hosts())


def once_per_group(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function of hashable arguments whose result depends on the process group, which must exist.

    The function is called once for each group and arguments. The results are forgotten with their group. A reference to
    the group itself must not be kept, since its threads end only with it, and one that is still at work when Python
    exits ends the process with an error.
    """
    results: weakref.WeakKeyDictionary[Any, dict[Any, T]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T:
        of_group = results.setdefault(distributed.group.WORLD, {})
        key = args, tuple(sorted(kwargs.items()))
        if key not in of_group:
            of_group[key] = function(*args, **kwargs)
        return of_group[key]

    return cached


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _hosts() -> Any:
    """Returns a group of all processes that communicates between hosts, so that the device is not waited for."""
    world = distributed.group.WORLD
    return world if "gloo" in distributed.get_backend_config(world) else _gloo_group()


@once_per_group
def _gloo_group() -> Any:
    return distributed.new_group(backend="gloo")
