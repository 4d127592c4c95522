"""Starts the processes of a run, joins them to a group, and ends them together; divides GPUs among jobs of a sweep.

``devices=N`` starts N processes of the same command line on this machine with torch.distributed's launcher. Processes
that torchrun or SLURM's srun has started, on one machine or several, find each other by their environment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from voxelfield import launch_environment, processes
from voxelfield.cli.command import INTERRUPTED, LAUNCHER, complain, exit_status
from voxelfield.devices import choose_device
from voxelfield.interrupt import SIGNALS, Interrupt
from voxelfield.settings import RunConfig
from voxelfield.training.checkpoints import agreement

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Name of the threads of calls of torch that may never return: Python cannot end in order beside them.
_CALL = "call of torch"

# How long a process that has failed waits for the launcher to end it, in seconds. The launcher looks ten times a
# second, torchrun likewise, and ends all processes once one has ended.
_VERDICT_SECONDS = 2.0
_CLOSING_SECONDS = 10
_POLL_SECONDS = 0.1

# Seconds between two attempts to reserve a GPU.
_FREE_GPU_SECONDS = 1.0

# In gloo's messages when another process does not answer; it raises a plain RuntimeError.
_TIMED_OUT = re.compile("Timed out waiting|timeout caused pair closure")


def count_processes(settings: RunConfig) -> int:
    """Returns how many processes a run has: those that have been started, or else those that ``devices`` asks for.

    Raises:
        ValueError: ``devices`` contradicts the processes that have been started, the GPUs there are, or ``device``.
    """
    started, given = launch_environment.started(), settings.devices
    on_cpu, gpus = settings.device == "cpu" or not torch.cuda.is_available(), torch.cuda.device_count()
    if started > 1:
        count = started
        if given not in (None, "all", str(started)):
            counted, remedy = "processes that were started", ""
            if launch_environment.by_slurm():
                counted = "tasks of this step of SLURM (SLURM_STEP_NUM_TASKS)"
                remedy = f": start it by srun --ntasks={given}, with --overlap inside of another step"
            raise ValueError(f"devices must be left out or {started}, the number of {counted}, got {given}{remedy}")
    elif given == "all":
        count = 1 if on_cpu else gpus
    else:
        count = int(given or 1)
    if count > 1:
        choose_device(settings.device)
        if ":" in settings.device:
            raise ValueError(f"device must be auto, cpu or cuda for {count} processes, got {settings.device!r}")
        if started == 1 and not on_cpu and count > gpus:
            raise ValueError(f"devices must be at most {gpus}, the CUDA devices that torch finds, got {count}")
    return count


def by_slurm() -> dict[str, str]:
    """Returns torch's variables for a task of srun, from SLURM's variables; raises ValueError if one is missing."""
    # Such as gpu[03-05,7],login, of which the first one has the first task.
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if not nodes:
        raise ValueError(
            "SLURM_STEP_NODELIST must be set where SLURM_PROCID and SLURM_STEP_NUM_TASKS are, got none: start the "
            "tasks by srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
    return {
        "RANK": str(launch_environment.variable("SLURM_PROCID")),
        "WORLD_SIZE": str(launch_environment.variable("SLURM_STEP_NUM_TASKS", 1)),
        "LOCAL_RANK": str(launch_environment.variable("SLURM_LOCALID")),
        "MASTER_ADDR": first,
        # Jobs that share a node have different ports.
        "MASTER_PORT": str(20000 + launch_environment.variable("SLURM_JOB_ID") % 10000),
    }


def launch(count: int, device: str) -> int:
    """Runs this program's command line in several processes on this machine; returns the exit status.

    Signals are passed on to them. They stop together and write their checkpoint, however long that takes. If one ends
    otherwise, the others are ended, and a message names it and its device, of the kind ``cpu`` or ``cuda``.
    """
    # Imported here, because no other run needs them.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    # Its reports take several lines; one is printed here instead.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Its handlers would end processes that take longer than half a minute, and make an error of SIGQUIT.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    # The launcher serves the store, so that its port is free and the end of no process takes it away. By itself, torch
    # would listen to other machines too.
    listening = socket.create_server(("127.0.0.1", 0))
    address, port = listening.getsockname()
    fd = listening.detach()
    store = distributed.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count))),
    }
    ignored = {number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN}
    workers = start_processes(
        name="train",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(count), tuple(sys.orig_argv[1:])),
        envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)},
        logs_specs=DefaultLogsSpecs(os.devnull),
    )
    # A process whose device waits for one that has ended does not react to a signal. Torch closes them when it finds
    # that one has ended, and would let the others have half a minute.
    close = functools.partial(workers.close, timeout=_CLOSING_SECONDS)
    workers.close = close  # type: ignore[method-assign]
    passed_on = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal passed_on
        passed_on = True
        for pid in workers.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in ignored else pass_on)
    try:
        result = workers.wait(period=_POLL_SECONDS)
    finally:
        close()
    # In the order in which they have ended.
    failure = next(iter(result.failures.values()), None) if result is not None else None
    if failure is None:
        return 0
    if failure.exitcode > 0:  # after it has printed a message
        return failure.exitcode
    if passed_on:
        return INTERRUPTED
    name = "cpu" if device == "cpu" else f"cuda:{failure.local_rank}"
    described = _described(failure.local_rank, count, name)
    hint = ", as the system does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
    return complain(f"{described} was ended by {failure.signal_name()}{hint}", 1)


def join(settings: RunConfig) -> None:
    """Joins the group of the processes that have been started, with one device each.

    Raises:
        ConnectionError: They have not found each other within ``process_timeout``.
    """
    hint = ""
    if launch_environment.by_slurm():
        hint = f", for the {launch_environment.started()} tasks of this step of SLURM"
        for name, value in by_slurm().items():
            os.environ.setdefault(name, value)
    launch_environment.variable("RANK", 0, launch_environment.started() - 1)
    port = launch_environment.variable("MASTER_PORT", 1, 2**16 - 1)
    device = choose_device(settings.device)
    if device.type == "cuda":
        # Divided grids are whole while they are resized. By default, torch keeps the memory that this took in segments
        # into which the next ones do not fit.
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        # With SLURM's binding, each task may see only one GPU.
        local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        torch.cuda.set_device(int(local) % torch.cuda.device_count())
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=settings.process_timeout)
    values = agreement(settings) | {"device": device.type}
    try:
        store, rank, count = _within(timeout, lambda: _meet(values, timeout))
        distributed.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=count)
    except RuntimeError as error:
        address, reason = f"{os.environ['MASTER_ADDR']}:{port}", str(error).partition("\n")[0]
        raise ConnectionError(f"the processes must find each other at {address}, got: {reason}{hint}") from error
    except ValueError:
        # The first process reports what all processes find.
        time.sleep(_VERDICT_SECONDS * (os.environ["RANK"] != "0"))
        raise


def _meet(values: Mapping[str, Any], timeout: timedelta) -> tuple[distributed.Store, int, int]:
    """Returns the store, rank and number of processes; raises ValueError if processes do not belong together."""
    if not (first := os.environ["RANK"] == "0"):
        _wait_for_address(time.monotonic() + timeout.total_seconds())
    try:
        store, rank, count = next(rendezvous("env://", timeout=timeout))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            if first:  # the address may be in use by another process of this rank, which waits for others
                _compare(_connect(), 0, launch_environment.started(), values, timedelta(seconds=_VERDICT_SECONDS))
        raise
    store = distributed.PrefixStore(_attempt(), store)
    _compare(store, rank, count, values, timeout)
    return store, rank, count


def _compare(store: distributed.Store, rank: int, count: int, values: Mapping[str, Any], timeout: timedelta) -> None:
    """Exchanges values through the store; raises ValueError if processes do not belong together."""
    # In the order in which the processes arrive, because two may have been given one rank.
    arrived = store.add("arrived", 1)
    store.set(f"values/{arrived}", json.dumps([rank, {**values, "WORLD_SIZE": count}]))
    found: dict[int, Any] = {}
    for key in (f"values/{number}" for number in range(1, max(count, arrived) + 1)):
        store.wait([key], timeout)
        try:
            other, other_values = json.loads(store.get(key))
        except (TypeError, ValueError):
            raise RuntimeError(f"an entry {key} of another program") from None
        if other in found:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ValueError(
                f"RANK, of the environment, must differ between processes, got {other} twice at {address}; or two runs "
                "have this address: give each another MASTER_PORT"
            )
        found[other] = other_values
        processes.check_alike(found)


def _wait_for_address(deadline: float) -> None:
    """Waits until the first process listens, while torch would print a line for each attempt to reach it."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while True:
        try:
            with socket.create_connection(address, _VERDICT_SECONDS):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(error.strerror or str(error)) from error
        time.sleep(_POLL_SECONDS)


def _within(timeout: timedelta, call: Callable[[], T]) -> T:
    """Returns the result of a call of torch that neither ends in time by itself nor lets signals be handled.

    Raises RuntimeError if it takes longer than the timeout by more than a second; it then goes on in its thread.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name=_CALL, daemon=True).start()
    try:
        return result.result(timeout.total_seconds() + 1)
    except NoAnswer:
        raise RuntimeError("no answer of a store") from None


def leave(status: int) -> None:
    """Leaves the group that this process may have joined, at the end of the program, which has an exit status.

    Processes that have succeeded wait until the first one ends, which may serve their store: by its end, a process
    would break collective calls of gloo that only the others have yet to complete.
    """
    if distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # other processes have ended, and maybe the store with them
            notes = _notes()
            if processes.is_first():
                notes.set("first_ends", "")
                if status in (0, INTERRUPTED):
                    others = [f"ends/{rank}" for rank in range(1, processes.count())]
                    notes.wait(others, timedelta(seconds=_VERDICT_SECONDS))
            elif status == 0:
                while not notes.check(["first_ends"]):
                    time.sleep(_POLL_SECONDS)
                notes.set(f"ends/{processes.rank()}", "")
    elif not any(thread.name == _CALL for thread in threading.enumerate()):
        return
    if status != 0:
        # Leaving in order would wait for the other processes, which may have ended.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    distributed.destroy_process_group()


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Leaves it to one process of a group to report an error of a block.

    Most errors occur in all processes, and the first one reports them. If one process ends, collective calls of the
    others fail, and these end without a message.

    Raises:
        TimeoutError: Another process has not answered; the message names it.
    """
    with Interrupt() as interrupt:
        try:
            yield
        except Exception as error:
            if processes.count() == 1 or (processes.is_first() and exit_status(error) is not None):
                raise
            notes = None
            with contextlib.suppress(RuntimeError):  # its process has ended, or does not answer
                notes = _notes()
                notes.set(f"failed/{processes.rank()}", "")
            deadline = time.monotonic() + _VERDICT_SECONDS
            while not interrupt.requested and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if interrupt.requested:
                sys.exit(1)
            if notes is not None and _TIMED_OUT.search(str(error)):
                silent = [rank for rank in range(processes.count()) if not notes.check([f"failed/{rank}"])]
                if silent:
                    names = " and ".join(map(str, silent))
                    message = f"each process must answer within process_timeout, got no answer of process {names}"
                    raise TimeoutError(message) from error
            raise


def _notes() -> distributed.Store:
    """Returns a connection to the group's store, with a prefix for notes between processes."""
    return distributed.PrefixStore("notes", _connect())


def _connect() -> distributed.Store:
    """Returns a connection to the group's store, with the prefix of this attempt."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=_VERDICT_SECONDS)
    store = _within(timeout, lambda: distributed.TCPStore(address, port, launch_environment.started(), timeout=timeout))
    return distributed.PrefixStore(_attempt(), store)


def describe() -> str:
    """Returns this process's number, device and host, for messages."""
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
    return _described(processes.rank(), processes.count(), device)


def _described(rank: int, count: int, device: str) -> str:
    return f"process {rank} of {count} ({device} on {socket.gethostname()})"


def _attempt() -> str:
    """Returns a prefix of keys in the store, which torchrun keeps when it restarts processes, with their addresses."""
    return f"voxelfield/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextlib.contextmanager
def reserve_device(requested: str, folder: Path) -> Iterator[str]:
    """Reserves a GPU for a job of a sweep, once one is free.

    Files in the folder of the sweep are locked, because Hydra's launchers neither know GPUs nor say where a job runs:
    joblib gives a process another job as soon as it has finished one, so that the number of a job determines nothing,
    and CUDA reads ``CUDA_VISIBLE_DEVICES`` only once in a process. A lock ends with its process, in whatever way that
    ends. GPUs have unique names, so a sweep may also run on several machines with a folder in common.

    Yields the device to configure instead, such as ``cuda:1``; a device other than ``auto`` and ``cuda`` as it is.
    """
    if requested not in ("auto", "cuda") or not torch.cuda.is_available():
        yield requested
        return
    names = [torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count())]
    locks = [FileLock(folder / f".{name}.lock") for name in names]
    while True:
        for index, lock in enumerate(locks):
            try:
                reserved = lock.acquire(timeout=0)
            except Timeout:
                continue
            with reserved:
                yield f"cuda:{index}"
            return
        time.sleep(_FREE_GPU_SECONDS)
