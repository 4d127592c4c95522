"""The processes that train together: their number, this process's place among them, and what they agree on.

They are those of torch.distributed's default process group, which ``devices=N``, torchrun, SLURM or a script of one's
own has made. Without a group there is one process, and nothing here communicates.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

P = ParamSpec("P")
T = TypeVar("T")


def started() -> int:
    """Returns the number of processes that torchrun or SLURM's srun has started with this one, by their variables."""
    group = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if all(name in os.environ for name in group):
        return int(os.environ["WORLD_SIZE"])
    # Those of the step, because a batch script, which srun has not started, has those of its job.
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) if "SLURM_PROCID" in os.environ else 1


def count() -> int:
    """Returns the number of processes, 1 without a process group."""
    return distributed.get_world_size() if _has_group() else 1


def rank() -> int:
    """Returns this process's number among them, from 0."""
    return distributed.get_rank() if _has_group() else 0


def is_first() -> bool:
    """Returns whether this process is the one that logs and writes files."""
    return rank() == 0


def rows(total: int, process: int | None = None) -> slice:
    """Returns a process's part of ``total`` rows, by default this one's.

    The parts follow each other and differ by one row at most.
    """
    number, processes = rank() if process is None else process, count()
    return slice(total * number // processes, total * (number + 1) // processes)


def gather_into(out: Tensor, own: Tensor) -> None:
    """Writes the tensors of all processes, of one size, into a contiguous one, one after the other.

    A collective call on the tensors' device. ``own`` may be this process's part of ``out``.
    """
    gather_later(out, own)()


def gather_later(out: Tensor, own: Tensor) -> Callable[[], object]:
    """Begins :func:`gather_into`; the result must be called before ``out`` is read, and before ``own`` is changed."""
    # Gloo must not read from the memory to which it writes.
    sent = own.reshape(-1) if own.is_cuda else own.flatten().clone()
    return _all_gather(out.view(-1), sent)


def gather_rows(own: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the rows of all processes, in their order, to each of them; a collective call on the tensor's device.

    Args:
        own: (R, ...) this process's rows.
        counts: The number of rows of each process.
    """
    most = max(counts)
    sent = own.contiguous()
    if most > len(own):
        sent = torch.cat((sent, sent.new_empty(most - len(own), *own.shape[1:])))
    received = own.new_empty(len(counts) * most, *own.shape[1:])
    gather_into(received, sent)
    if min(counts) == most:
        return received
    return torch.cat([part[:size] for part, size in zip(received.split(most), counts, strict=True)])


def sum_of(values: Tensor) -> Tensor:
    """Returns the sum of a tensor over all processes, which is the same in each of them; a collective call."""
    if count() == 1:
        return values
    total = values.clone()
    distributed.all_reduce(total)
    return total


def sum_later(values: Tensor) -> Callable[[], Tensor]:
    """Begins to sum a contiguous tensor over all processes; the function that is returned waits, and returns the sum.

    A collective call. The device can do other work meanwhile; ``values`` becomes the sum.
    """
    if count() == 1:
        return lambda: values
    work = distributed.all_reduce(values, async_op=True)

    def arrive() -> Tensor:
        work.wait()
        return values

    return arrive


def of_first(values: Tensor) -> Tensor:
    """Returns the tensor of process 0, given one of the same shape in each; a collective call."""
    copied = values.clone()
    distributed.broadcast(copied, 0)
    return copied


def gather_objects(value: Any) -> list[Any]:
    """Returns the values of all processes, in their order, to each of them; they are pickled.

    A collective call: each process must make it, in the same order among all collective calls.
    """
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    distributed.all_gather_object(values, value, group=_hosts())
    return values


def gather_results(call: Callable[[], T]) -> list[T]:
    """Returns what a function returns in each process, in their order, to all of them.

    A collective call, but the function may fail in some processes alone.

    Raises:
        BaseException: The error of the first process in which the function failed, in all of them.
    """
    if count() == 1:
        return [call()]
    own: T | BaseException
    try:
        own = call()
    except (Exception, KeyboardInterrupt) as error:  # without an answer, the others would wait for this process
        own = error
    results = gather_objects(own)
    results[rank()] = own  # not its pickled copy: with the traceback
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def concatenated(own: Callable[[], Sequence[T]]) -> list[T]:
    """Returns the values that a function returns in all processes, one after the other, as :func:`gather_results`."""
    return [value for values in gather_results(own) for value in values]


class DividedRows:
    """Rows of which each process has some: those of all, in the order of the processes, read by their numbers.

    Making it and reading from it are collective calls; reading does not synchronise with the device.

    Args:
        own: (R, ...) this process's rows, of any dtype.
    """

    def __init__(self, own: Tensor) -> None:
        counts = row_counts(own)
        self._first, self._count, self._total = sum(counts[: rank()]), len(own), sum(counts)
        self._own = own if len(own) > 0 else own.new_zeros(1, *own.shape[1:])

    def __len__(self) -> int:
        """Number of rows of all processes."""
        return self._total

    def __getitem__(self, index: Tensor) -> Tensor:
        """Returns rows by their numbers (P,), which must be the same in all processes."""
        own = index - self._first
        elsewhere = (own < 0) | (own >= self._count)
        rows = self._own[own.masked_fill_(elsewhere, 0)]
        rows = rows.masked_fill_(elsewhere.view(-1, *[1] * (rows.dim() - 1)), 0)
        # Bytes, of which each comes from one process: exact for every dtype.
        return sum_of(rows.view(torch.uint8)).view(rows.dtype)

    def of_each(self, index: Tensor) -> Tensor:
        """Returns rows by numbers (P, ...) of which each process has others, and as many as it likes."""
        own = index.flatten()
        counts = row_counts(own)
        first = sum(counts[: rank()])
        rows = self[gather_rows(own, counts)]
        return rows[first : first + index.numel()].unflatten(0, index.shape)


def gather_to_first(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors of all processes, in their order, to the first of them, and nothing to the others.

    A collective call. The tensors, of one shape and dtype, are on the devices of the processes and stay there.
    """
    if count() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor) for _ in range(count())] if is_first() else None
    distributed.gather(tensor.contiguous(), tensors)
    return tensors or []


def gather_counts(own: int) -> list[int]:
    """Returns a number of each process, in their order; a collective call that does not wait for the device."""
    if count() == 1:
        return [own]
    counts = torch.empty(count(), dtype=torch.int64)
    _all_gather(counts, torch.tensor([own]), group=_hosts())()
    return counts.tolist()


def row_counts(own: Tensor) -> list[int]:
    """Returns the number of rows of each process's tensor; a collective call that does not wait for the device.

    While a CUDA graph is captured, which cannot depend on the host, all processes must have the same number.
    """
    if own.is_cuda and torch.cuda.is_current_stream_capturing():
        return [len(own)] * count()
    return gather_counts(len(own))


def any_of(flag: bool) -> bool:
    """Returns whether a flag is set in any process; a collective call that does not wait for the device."""
    if count() == 1:
        return flag
    flags = torch.tensor(int(flag))
    distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=_hosts())
    return bool(flags)


def wait() -> None:
    """Waits until all processes have come here; a collective call."""
    if count() > 1:
        distributed.barrier(group=_hosts())


def once_per_group(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function of the process group, which must exist, and of hashable arguments.

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


def _all_gather(out: Tensor, own: Tensor, group: Any = None) -> Callable[[], object]:
    # Torch 2.13 has renamed it, and warns of the earlier name.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    work = gather(out, own, group=group, async_op=True)
    return work.wait


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _hosts() -> Any:
    """Returns a group of all processes that communicates between hosts, so that the device is not waited for."""
    world = distributed.group.WORLD
    return world if "gloo" in distributed.get_backend_config(world) else _gloo_group()


@once_per_group
def _gloo_group() -> Any:
    return distributed.new_group(backend="gloo")
