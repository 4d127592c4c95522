"""Copies between host and device: they arrive whole, and neither side waits for the other."""

import pytest
import torch

from voxelfield.devices import OnDevice, Uploads


def test_on_the_cpu_nothing_is_copied():
    tensor = torch.rand(3)
    assert OnDevice(tensor).fetch() is tensor
    assert Uploads().to(tensor, torch.device("cpu")) is tensor


@pytest.mark.cuda
def test_copies_arrive_whole_while_the_gpu_is_busy():
    uploads, device = Uploads(), torch.device("cuda")
    given = [torch.randint(256, (200, 300, 4), dtype=torch.uint8) for _ in range(12)]
    on_the_way = []
    for image in given:
        torch.cuda._sleep(2_000_000)  # about a millisecond
        on_the_way.append(OnDevice(uploads.to(image, device) + 1))
    for image, copy in zip(given, on_the_way, strict=True):
        assert torch.equal(copy.fetch(), image + 1)


@pytest.mark.cuda
def test_the_host_is_a_few_uploads_ahead_of_the_gpu_and_no_more():
    uploads, image = Uploads(), torch.zeros(100, 100, 4, dtype=torch.uint8)
    done = []
    for _ in range(8):
        torch.cuda._sleep(100_000_000)  # about fifty milliseconds
        uploads.to(image, torch.device("cuda"))
        done.append(torch.cuda.current_stream().record_event())
    finished = sum(event.query() for event in done)
    assert 3 <= finished < 8
    assert not done[-1].query()
