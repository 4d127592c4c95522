"""The processes that train together: their number, this process's rank, and collective calls.

They are torch.distributed's default process group, which ``devices=N``, torchrun, SLURM or a user's script has made.
Without a group there is one process, and nothing here communicates.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

P = ParamSpec("P")
T = TypeVar("T")

SLAB_ELEMENTS = 1 << 24
"""Elements of a temporary tensor, 64 MiB of float32: larger tensors are exchanged or resampled a few rows at a time."""


def started() -> int:
    """Returns the number of processes that torchrun or SLURM's srun has started with this one, by their variables."""
    group = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if all(name in os.environ for name in group):
        return int(os.environ["WORLD_SIZE"])
    # The variable of the step: a batch script, which srun has not started, has the variables of its job.
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) if "SLURM_PROCID" in os.environ else 1


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


def gather_into(out: Tensor, local: Tensor) -> None:
    """Writes the tensors of all processes, of one size, into a contiguous one, in the order of ranks.

    A collective call on the tensors' device. ``local`` may be this process's slice of ``out``.
    """
    gather_later(out, local)()


def gather_later(out: Tensor, local: Tensor) -> Callable[[], object]:
    """Begins :func:`gather_into`; the result must be called before ``out`` is read, and before ``local`` is changed."""
    # Gloo must not read from the memory to which it writes.
    sent = local.reshape(-1) if local.is_cuda else local.flatten().clone()
    return _all_gather(out.view(-1), sent)


def gather_rows(local: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the rows of all processes, in the order of ranks, to each of them; a collective call.

    Args:
        local: (R, ...) this process's rows, which are exchanged on their device.
        counts: The number of rows of each process.
    """
    longest = max(counts)
    sent = local.contiguous()
    if longest > len(local):
        sent = torch.cat((sent, sent.new_empty(longest - len(local), *local.shape[1:])))
    received = local.new_empty(len(counts) * longest, *local.shape[1:])
    gather_into(received, sent)
    if min(counts) == longest:
        return received
    return torch.cat([rows[:size] for rows, size in zip(received.split(longest), counts, strict=True)])


def row_slabs(local: Tensor, bounds: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Yields the rows of all processes, a few at a time; a collective call, and so is each step of the iteration.

    Args:
        local: (R, ...) this process's rows.
        bounds: The first row of each process among the rows of all, followed by their number.

    Yields:
        A process, the index of the first of some of its rows, and these rows. The rows of a process are in order.
    """
    row, longest = local.shape[1:], max(end - begin for begin, end in pairwise(bounds))
    at_once = max(1, SLAB_ELEMENTS // (count() * max(math.prod(row), 1)))
    for first in range(0, longest, at_once):
        some = min(at_once, longest - first)
        sent = local.new_zeros(some, *row)
        slab = local[first : first + some]
        sent[: len(slab)] = slab
        received = local.new_empty(count() * some, *row)
        gather_into(received, sent)
        for process, (begin, end) in enumerate(pairwise(bounds)):
            rows = min(some, end - begin - first)
            if rows > 0:
                yield process, begin + first, received[process * some : process * some + rows]


def collect_rows(local: Tensor, bounds: Sequence[int], out: Tensor, low: int = 0) -> None:
    """Writes rows of all processes into one tensor, on any device; a collective call.

    Args:
        local: As for :func:`row_slabs`.
        bounds: As for :func:`row_slabs`.
        out: Receives the rows from ``low`` on; each process may ask for others.
        low: The index of the first of them.
    """
    for _, first, rows in row_slabs(local, bounds):
        begin, end = max(first, low), min(first + len(rows), low + len(out))
        if begin < end:
            out[begin - low : end - low] = rows[begin - first : end - first]


def rows_between(local: Tensor, bounds: Sequence[int], low: int, high: int) -> Tensor:
    """Returns the rows from ``low`` to ``high``; a collective call with arguments as for :func:`row_slabs`."""
    rows = local.new_empty(high - low, *local.shape[1:])
    collect_rows(local.detach(), bounds, rows, low)
    return rows


def sum_of(values: Tensor) -> Tensor:
    """Returns the sum of a tensor over all processes, which is the same in each of them; a collective call."""
    if count() == 1:
        return values
    total = values.clone()
    distributed.all_reduce(total)
    return total


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


class DividedRows:
    """The rows of all processes, in the order of ranks, of which each process stores some; read by index.

    Making it and reading from it are collective calls; reading does not synchronise with the device.

    Args:
        local: (R, ...) this process's rows, of any dtype.
    """

    def __init__(self, local: Tensor) -> None:
        counts = row_counts(local)
        self._first, self._count, self._total = sum(counts[: rank()]), len(local), sum(counts)
        self._local = local if len(local) > 0 else local.new_zeros(1, *local.shape[1:])

    def __len__(self) -> int:
        """Number of rows of all processes."""
        return self._total

    def __getitem__(self, index: Tensor) -> Tensor:
        """Returns rows by their indices (P,), which must be the same in all processes."""
        local = index - self._first
        elsewhere = (local < 0) | (local >= self._count)
        rows = self._local[local.masked_fill_(elsewhere, 0)]
        rows = rows.masked_fill_(elsewhere.view(-1, *[1] * (rows.dim() - 1)), 0)
        # Bytes, of which each comes from one process: exact for every dtype.
        return sum_of(rows.view(torch.uint8)).view(rows.dtype)

    def of_each(self, index: Tensor) -> Tensor:
        """Returns rows by indices (P, ...), of which each process may have different ones, and any number."""
        local = index.flatten()
        counts = row_counts(local)
        first = sum(counts[: rank()])
        rows = self[gather_rows(local, counts)]
        return rows[first : first + index.numel()].unflatten(0, index.shape)


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
    _all_gather(counts, torch.tensor([local]), group=_hosts())()
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


def _all_gather(out: Tensor, local: Tensor, group: Any = None) -> Callable[[], object]:
    # Torch 2.13 has renamed it, and warns of the earlier name.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    work = gather(out, local, group=group, async_op=True)
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
