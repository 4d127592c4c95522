"""Memory to which the processes of a machine write directly: when it is used, and what is said when it is not."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch
import torch.distributed as dist

from voxelfield import devices, processes
from voxelfield.distributed import exchange
from voxelfield.distributed.exchange import DirectExchange

GPU = torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch):
    """Two processes of a machine, of which the other one says the same, with GPUs that reach each other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather_objects", lambda own: [own, own])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    monkeypatch.setattr(exchange, "PeerMemory", Tried)
    yield monkeypatch
    dist.destroy_process_group()


class Tried:
    def __init__(self, *_):
        pass

    def barrier(self):
        pass


class Failing(Tried):
    def barrier(self):
        raise RuntimeError("no file descriptors are exchanged here\nframe #0: somewhere")


def others(own):
    """What another machine's process answers, for the name of its machine."""
    return [own, ("elsewhere", own[1])]


def test_gpus_that_reach_each_other_share_memory(two_gpus, caplog):
    with caplog.at_level(logging.INFO):
        assert exchange.shares_memory(GPU)
    assert not caplog.records


def test_processes_on_cpus_do_not(two_gpus):
    assert not exchange.shares_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        (processes, "gather_objects", others, "in several machines"),
        (processes, "count", lambda: 9, "more than 8"),
        (torch.cuda, "can_device_access_peer", lambda device, other: False, "GPU 1 cannot reach the memory of GPU 0"),
        (exchange, "PeerMemory", Failing, "no file descriptors are exchanged here"),
    ],
    ids=["machines", "processes", "reach", "error"],
)
def test_others_say_why_once(two_gpus, caplog, where, name, value, why):
    two_gpus.setattr(where, name, value)
    with caplog.at_level(logging.INFO):
        assert not exchange.shares_memory(GPU)
        assert not exchange.shares_memory(GPU)
    (record,) = caplog.records
    assert why in record.getMessage().partition(", because ")[2]
    assert "\n" not in record.getMessage()


def test_users_can_forbid_it_as_for_nccl(two_gpus, caplog):
    two_gpus.setenv("NCCL_P2P_DISABLE", "1")
    with caplog.at_level(logging.INFO):
        assert not exchange.shares_memory(GPU)
    assert "NCCL_P2P_DISABLE is 1" in caplog.text


def test_what_is_known_of_a_group_is_forgotten_with_it():
    calls = []

    @processes.once_per_group
    def number(name):
        calls.append(name)
        return len(calls)

    for first in (1, 3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = weakref.ref(dist.group.WORLD)
        assert [number("a"), number("b"), number("a"), number(name="c")] == [first, first + 1, first, first + 2]
        dist.destroy_process_group()
        assert group() is None
        del calls[2:]
    assert calls == ["a", "b"]


@pytest.mark.cuda
def test_memory_counts_while_it_lasts(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        device = torch.device("cuda", 0)
        before = devices.peak_bytes(device)
        memory = exchange.PeerMemory(1 << 20, torch.float32, device)
        memory.tensors[0].fill_(3)
        memory.barrier()
        assert memory.tensors[0].sum() == 3 << 20
        assert devices.peak_bytes(device) >= before
        assert devices.UNCOUNTED_BYTES["now"] == 4 << 20
        del memory
        assert devices.UNCOUNTED_BYTES["now"] == 0
    finally:
        dist.destroy_process_group()


def test_what_a_side_stream_sends_stays_allocated_until_it_has_arrived(two_gpus):
    """The allocator may reuse memory of freed tensors on the main stream, which waits for the side stream in arrive."""
    sent, arrived = [], []

    class Beside(Tried):
        def __init__(self, size):
            self.tensors = [torch.zeros(size), torch.zeros(size)]

        def run_beside(self, send):
            send()
            return lambda: arrived.append([own() is not None for own in sent])

    two_gpus.setattr(processes, "row_counts", lambda own: [len(own)] * 2)
    exchange = DirectExchange.__new__(DirectExchange)
    memory = Beside(1000)
    vars(exchange).update(_copies=memory, _received={torch.float32: memory}, _max_received=7, _in_use=False)
    rows = [torch.rand(7, 4), torch.rand(7, 3)]
    expected = torch.cat([own.flatten() for own in rows])
    sent += map(weakref.ref, rows)
    received = exchange.receive(rows)
    del rows
    next(received)
    assert len(next(received)) == 2
    assert arrived == [[True, True]]
    assert torch.equal(memory.tensors[1][:28], expected[:28])
    assert list(received) == []
    assert [own() for own in sent] == [None, None]
