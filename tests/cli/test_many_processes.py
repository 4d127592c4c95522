"""Runs of several processes on CPUs: started by ``devices=N``, torchrun or SLURM, stopped, killed, and refused."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from free_ports import free_port
from process_groups import TRAIN, Group
from short_runs import TINY

from voxelfield.cli import launching
from voxelfield.settings import RunConfig, preset
from voxelfield.trained.checkpoint_file import checkpoint_path, load_checkpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ENDLESS = "trainer.steps=1000000"


@pytest.fixture
def start():
    """Starts runs, of which nothing is left after the test."""
    with ExitStack() as started:
        yield lambda *arguments, **options: started.enter_context(Group(*arguments, **options))


def wait_for_the_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def check_stopped(directory: Path, out: str) -> int:
    """Checks that a run has stopped with one checkpoint, and has said so once; returns the step."""
    (stopped,) = re.findall(r"stopped after step (\d+); continue with: voxelfield train resume=\S+", out)
    assert [path.name for path in directory.glob("*.pt")] == [checkpoint_path(directory, int(stopped)).name]
    assert not (directory / ".lock").exists()
    return int(stopped)


def test_two_processes_write_one_run(start, tmp_path):
    directory = tmp_path / "runs" / "one"
    code, out, err = start(directory, "devices=2").finish()
    assert (code, err) == (0, "")
    assert out.count("PSNR") == 3, "more than one process has logged its progress and result"
    assert list((tmp_path / "runs").iterdir()) == [directory]
    assert len(list(directory.glob("events.out.tfevents.*"))) == 1
    assert {"metrics.json", "model.safetensors", "train.log", "checkpoint_0000020.pt"} <= {
        path.name for path in directory.iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", pytest.param("worker", marks=pytest.mark.sweep)])
def test_a_signal_to_any_process_stops_all_with_one_checkpoint(start, tmp_path, to):
    running = start(tmp_path, "devices=2", ENDLESS)
    running.wait_for_checkpoint(tmp_path)
    os.kill(running.launcher.pid if to == "launcher" else running.workers()[1], signal.SIGTERM)
    code, out, err = running.finish()
    assert (code, err) == (130, "")
    step = check_stopped(tmp_path, out)

    code, out, err = start(tmp_path, f"trainer.steps={step + 2}", "resume=auto").finish()
    assert (code, err) == (0, "")
    assert f"resumed at step {step}" in out


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "react"), [(0, True), pytest.param(2, False, marks=pytest.mark.sweep)])
def test_a_killed_process_ends_the_others_with_one_line(start, tmp_path, rank, react):
    running = start(tmp_path, "devices=3", ENDLESS, "trainer.checkpoint_every=5")
    running.wait_for_checkpoint(tmp_path)
    others = running.workers()
    killed = others.pop(rank)
    if not react:  # as if their devices waited for that of the killed one
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    began = time.monotonic()
    code, _, err = running.finish()
    assert time.monotonic() - began < 30
    assert code == 1
    assert re.fullmatch(rf"process {rank} of 3 \(cpu on \S+\) was ended by SIGKILL, as .*\n", err)
    for pid in others:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert load_checkpoint(tmp_path)["step"] >= 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_processes_end_with_a_launcher_that_was_killed(start, tmp_path, torchrun):
    command = (*TORCHRUN, "-m", "voxelfield", "train", *TINY) if torchrun else (*TRAIN, *TINY, "devices=2")
    running = start(tmp_path, ENDLESS, "trainer.checkpoint_every=5", command=command)
    running.wait_for_checkpoint(tmp_path)
    workers = running.workers()
    running.launcher.kill()
    running.launcher.wait()
    wait_for_the_end(workers)
    step = load_checkpoint(tmp_path)["step"]
    code, out, err = start(tmp_path, f"trainer.steps={step + 2}", "resume=auto", "devices=2").finish()
    assert (code, err) == (0, "")
    assert f"resumed at step {step}" in out


@pytest.mark.slow
def test_a_process_whose_launcher_has_ended_before_does_not_begin(tmp_path):
    variables = {"VOXELFIELD_LAUNCHER": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [*TRAIN, *TINY, f"hydra.run.dir={tmp_path / 'run'}", "device=cpu", ENDLESS]
    done = subprocess.run(command, env={**os.environ, **variables}, check=False, timeout=60, capture_output=True)
    assert done.returncode == 1
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine")
def test_the_store_of_a_launcher_is_found_at_one_address_only(monkeypatch):
    def look(*, envs, **_):
        port = int(envs[0]["MASTER_PORT"])
        socket.create_connection(("127.0.0.1", port)).close()
        for elsewhere in ("127.0.0.2", socket.gethostbyname(socket.gethostname())):
            if elsewhere != "127.0.0.1":
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((elsewhere, port))
        raise InterruptedError("seen")

    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.start_processes", look)
    with pytest.raises(InterruptedError, match="seen"):
        launching.launch(2, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("key", "first", "second"), [("seed", "1", "2"), ("trainer.rates.grid", "0.1", "0.2")])
def test_processes_with_different_settings_are_refused(start, tmp_path, key, first, second):
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    given = {"0": f"{key}={first}", "1": f"{key}={second}"}
    line = f"{key} must be the same in all processes, got {first} in process 0 and {second} in process 1\n"
    for each in [start(tmp_path / "run", override, RANK=rank, **group) for rank, override in given.items()]:
        assert each.finish() == (2, "", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "twice"), [("011", 1), ("00", 0)])
def test_processes_with_one_rank_are_refused(start, tmp_path, ranks, twice):
    group = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    started = [start(tmp_path / "run", RANK=rank, **group) for rank in ranks]
    at = f"localhost:{group['MASTER_PORT']}"
    line = (
        f"RANK, of the environment, must differ between processes, got {twice} twice at {at}; or two runs have this "
        "address: give each another MASTER_PORT\n"
    )
    assert [each.finish(within=60) for each in started] == [(2, "", line)] * len(ranks)


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_a_number_of_processes_without_their_other_variables_is_refused(monkeypatch, missing):
    for name in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - {missing}:
        monkeypatch.setenv(name, "4")
    expected = f"^WORLD_SIZE, of the environment, must be 1 or unset without {missing}, got 4"
    with pytest.raises(ValueError, match=expected):
        launching.count_processes(RunConfig(device="cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launching.count_processes(RunConfig(device="cpu")) == 1


@pytest.mark.slow
def test_a_stranger_in_the_store_is_one_line(start, tmp_path):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("voxelfield/0/values/2", "hello")
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0"}
    code, out, err = start(tmp_path / "run", **group, TORCHELASTIC_USE_AGENT_STORE="True").finish()
    assert (code, out) == (1, "")
    assert re.fullmatch(r"the processes must find each other at .*, got: an entry values/2 of another program\n", err)


@pytest.mark.slow
def test_nobody_at_the_address_of_the_first_process_is_one_line(start, tmp_path):
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "1"}
    code, out, err = start(tmp_path / "run", "process_timeout=1", **group).finish()
    assert (code, out) == (1, "")
    assert re.fullmatch(r"the processes must find each other at 127\.0\.0\.1:\d+, got: Connection refused\n", err)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b"\xff" * 65536])
def test_lines_of_torch_about_another_program_in_place_of_the_store_are_not_printed(start, tmp_path, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        running = start(tmp_path / "run", "process_timeout=1", RANK="1", **group)
        server.settimeout(0.1)
        while running.launcher.poll() is None:
            with contextlib.suppress(OSError):
                server.accept()[0].sendall(answer)
        code, out, err = running.finish()
    assert (code, out) == (1, "")
    assert re.fullmatch(r"the processes must find each other at 127\.0\.0\.1:.*\n", err)


@pytest.mark.slow
def test_no_run_goes_on_alone_where_its_processes_cannot_be_started(tmp_path):
    full = """
import subprocess, sys
from voxelfield.cli.command import main
def full(*_, **__):
    raise BlockingIOError(11, "Resource temporarily unavailable")
subprocess.Popen = full
sys.exit(main(["train", *sys.argv[1:]]))
"""
    with Group(tmp_path, "devices=2", command=(sys.executable, "-c", full, *TINY)) as running:
        assert running.finish() == (1, "", "[Errno 11] Resource temporarily unavailable\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sigquit_ends_a_run_of_several_processes(start, tmp_path):
    running = start(tmp_path, "devices=2", ENDLESS)
    running.wait_for_checkpoint(tmp_path)
    workers = running.workers()
    running.launcher.send_signal(signal.SIGQUIT)
    code, _, err = running.finish()
    assert (code, err) == (-signal.SIGQUIT, "")
    wait_for_the_end(workers)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_a_silent_program_in_place_of_the_store_is_no_reason_to_wait(start, tmp_path, stopped):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        running = start(tmp_path / "run", f"process_timeout={600 if stopped else 1}", RANK="1", **group)
        connection, _ = silent.accept()
        with connection:
            if stopped:
                running.launcher.terminate()
            code, out, err = running.finish(within=30)
    assert (code, out) == (130 if stopped else 1, "")
    assert err == "" if stopped else err.startswith("the processes must find each other at 127.0.0.1:")


# Runs train.py where one process fails in its first step.
FAILING = """
import os, sys
from voxelfield.cli.train import main
from voxelfield.training.session import Session

if os.environ.get("RANK") == "1":
    def fail(self):
        raise {error}
    Session._advance = fail
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("error", "line"),
    [("MemoryError('no room')", "not enough memory on cpu: .*"), ("IndexError('far off')", "IndexError: far off")],
)
def test_an_error_in_one_process_is_one_line_that_names_it(start, tmp_path, error, line):
    command = (sys.executable, "-c", FAILING.format(error=error), *TINY)
    code, _, err = start(tmp_path, "devices=2", ENDLESS, command=command).finish()
    assert code == 1
    assert re.fullmatch(rf"process 1 of 2 \(cpu on \S+\): {line}\n", err), err


@pytest.mark.sweep
def test_a_process_that_does_not_answer_is_named(start, tmp_path):
    running = start(tmp_path, "devices=2", ENDLESS, "process_timeout=3")
    running.wait_for_checkpoint(tmp_path)
    _, stopped = running.workers()
    os.kill(stopped, signal.SIGSTOP)
    running.wait_until(lambda: running.workers() == [stopped])
    os.kill(stopped, signal.SIGCONT)  # to end now, rather than half a minute later
    code, _, err = running.finish()
    assert code == 1
    assert "each process must answer within process_timeout, got no answer of process 1" in err
    assert err.count("\n") == 1


@pytest.mark.sweep
def test_torchrun_restarts_a_run_whose_process_was_killed(start, tmp_path):
    command = (*TORCHRUN, "--max-restarts=1", "-m", "voxelfield", "train", *TINY)
    running = start(tmp_path, ENDLESS, "resume=auto", command=command)
    running.wait_for_checkpoint(tmp_path)
    os.kill(running.workers()[1], signal.SIGKILL)
    running.wait_until(lambda: "resumed at step" in (tmp_path / "train.log").read_text())
    resumed = load_checkpoint(tmp_path)["step"]
    running.wait_until(lambda: not checkpoint_path(tmp_path, resumed).exists())
    running.launcher.send_signal(signal.SIGTERM)
    _, out, _ = running.finish()
    assert check_stopped(tmp_path, out) > resumed


@pytest.mark.sweep
def test_tasks_of_slurm_are_one_run(start, tmp_path):
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "1"}
    slurm = {**step, "MASTER_PORT": str(free_port())}
    tasks = [
        start(tmp_path, command=(*TRAIN, *TINY), SLURM_PROCID=task, SLURM_LOCALID=task, **slurm) for task in ("0", "1")
    ]
    (code, out, err), silent = (task.finish() for task in tasks)
    assert (code, err) == (0, "")
    assert "PSNR" in out
    assert silent == (0, "", "")


def test_the_first_task_of_slurm_has_the_address_and_the_job_the_port(monkeypatch):
    variables = {"PROCID": "5", "STEP_NUM_TASKS": "8", "LOCALID": "1", "JOB_ID": "654321"}
    for name, value in (variables | {"STEP_NODELIST": "gpu-a[03-05,7],login1"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu-a03", "MASTER_PORT": "24321"}
    assert launching.by_slurm() == expected
    monkeypatch.setenv("SLURM_STEP_NODELIST", "login1,gpu-a[03-05,7]")
    assert launching.by_slurm()["MASTER_ADDR"] == "login1"


def test_variables_of_slurm_that_are_missing_or_no_numbers_are_named(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ValueError, match=r"^devices must be left out or 2, .* SLURM \(SLURM_STEP_NUM_TASKS\), got 1: "):
        launching.count_processes(RunConfig(device="cpu", devices="1"))
    with pytest.raises(ValueError, match=r"^SLURM_STEP_NODELIST must be set where SLURM_PROCID"):
        launching.join(RunConfig(device="cpu"))
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    with pytest.raises(ValueError, match=r"^SLURM_LOCALID, of the environment, must be a whole number .*, got ''$"):
        launching.join(RunConfig(device="cpu"))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "two")
    with pytest.raises(ValueError, match=r"^SLURM_STEP_NUM_TASKS, of the environment, .*, got 'two'$"):
        launching.count_processes(RunConfig(device="cpu"))


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "-1"), ("RANK", "2"), ("MASTER_PORT", "99999")])
def test_variables_of_torch_that_are_out_of_range_are_named(monkeypatch, name, value):
    group = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for key, text in (group | {name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(ValueError, match=rf"^{name}, of the environment, must be a whole number .*, got '{value}'$"):
        launching.join(RunConfig(device="cpu", devices=str(launching.count_processes(RunConfig(device="cpu")))))


@pytest.mark.parametrize(
    ("devices", "device", "started", "message"),
    [
        ("4", "cuda", 1, r"devices must be at most 2, the CUDA devices .*, got 4"),
        ("2", "cuda:1", 1, "device must be auto, cpu or cuda for 2 processes, got 'cuda:1'"),
        ("all", "cuda:0", 1, "device must be auto, cpu or cuda for 2 processes, got 'cuda:0'"),
        ("3", "auto", 2, "devices must be left out or 2, the number of processes that were started, got 3"),
        ("1", "auto", 2, "devices must be left out or 2, the number of processes that were started, got 1"),
        (None, "cuda:1", 2, "device must be auto, cpu or cuda for 2 processes, got 'cuda:1'"),
    ],
)
def test_devices_that_contradict_the_machine_are_refused(monkeypatch, devices, device, started, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if started > 1:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, str(started))
    with pytest.raises(ValueError, match=f"^{message}$"):
        launching.count_processes(RunConfig(devices=devices, device=device))


def test_devices_are_counted(monkeypatch):
    count = launching.count_processes
    assert count(RunConfig(device="cpu")) == 1
    assert count(RunConfig(device="cpu", devices="all")) == 1
    assert count(RunConfig(device="cpu", devices="3")) == 3
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert count(RunConfig()) == 1
    assert count(RunConfig(devices="all")) == 4
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    assert [count(RunConfig(devices=devices)) for devices in (None, "all", "2")] == [2, 2, 2]


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_processes_on_gpus_use_expandable_segments_unless_told_otherwise(monkeypatch, given):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    for name, value in {"MASTER_ADDR": "nowhere", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launching, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def nobody(*_, **__):
        raise RuntimeError("nobody there")

    monkeypatch.setattr(launching, "rendezvous", nobody)
    monkeypatch.setattr(launching, "_connect", nobody)  # its thread might outlive this program, which torch aborts
    with pytest.raises(ConnectionError, match="nobody there"):
        launching.join(preset("devices=2"))
    chosen = {None: "expandable_segments:True", "PYTORCH_ALLOC_CONF": None}
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == chosen.get(given, "max_split_size_mb:64")


@pytest.mark.slow
def test_a_sweep_with_several_processes_is_refused(start, tmp_path):
    code, _, err = start(tmp_path, f"hydra.sweep.dir={tmp_path}", "devices=2", command=(*TRAIN, "-m", *TINY)).finish()
    assert code == 2
    assert "devices must be 1 in a sweep, got 2" in err


@pytest.mark.slow
def test_one_process_starts_nothing_distributed(start, tmp_path):
    program = """
import sys
import torch

before = set(sys.modules)
from voxelfield.cli.train import main

status = main(sys.argv[1:])
print(*(name for name in set(sys.modules) - before if name.startswith("torch.distributed")), file=sys.stderr)
assert not torch.distributed.is_initialized()
sys.exit(status)
"""
    command = (sys.executable, "-c", program, *TINY)
    assert start(tmp_path, "trainer.steps=2", command=command).finish()[::2] == (0, "\n")
