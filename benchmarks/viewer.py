"""Measures the viewer from a browser's perspective: frames per second, and latency from camera message to image.

A websocket client on the same machine speaks viser's protocol: it rotates the camera about the scene and records when
images arrive. ``--rate`` sets the desired number of frames per second, and images are as large as the machine can
render at that rate. Two measurements are made:

- throughput: the camera moves 240 times a second, and all arriving images are counted;
- latency: the camera moves once, and the next message is sent after the image has arrived.

    python benchmarks/viewer.py runs/bricks/latest --size 800
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import statistics
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import viser
import websockets
import zstandard
from PIL import Image

from voxelfield.cli.trained import run_view
from voxelfield.rendering.viewpoints import Viewpoint
from voxelfield.viewer.page import ViewerPage

_MESSAGES_PER_SECOND = 240
_WARM_UP_SECONDS = 3.0


class Client:
    """A browser without a window.

    Args:
        page: The page, served by this process.
        size: Height and width of its canvas.
    """

    def __init__(self, page: ViewerPage, size: tuple[int, int]) -> None:
        self._page = page
        self._size = size
        home = page.home
        self._fov = home.fov
        self._target = page.box.mean(dim=0).double()
        self._start = home.matrix.double()
        self.pictures: list[tuple[float, bytes]] = []
        self._arrived = asyncio.Event()

    async def run(self, measure: Any) -> Any:
        """Connects, measures, and disconnects."""
        server = self._page.server
        uri = f"ws://127.0.0.1:{server.get_port()}"
        protocol = websockets.Subprotocol(f"viser-v{viser.__version__}")
        async with websockets.connect(
            uri, subprotocols=[protocol], max_size=None, compression=None, open_timeout=30
        ) as self._socket:
            receiving = asyncio.create_task(self._receive())
            measuring = asyncio.create_task(measure(self))
            # Stops at whichever ends first: an image that cannot be read would otherwise be awaited forever.
            done, pending = await asyncio.wait({receiving, measuring}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            return done.pop().result()

    async def move(self, turn: float) -> None:
        """Sends a camera rotated about the scene by an angle, radians."""
        cosine, sine = math.cos(turn), math.sin(turn)
        rotation = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
        c2w = self._start.clone()
        c2w[:3, :3] = rotation @ self._start[:3, :3]
        c2w[:3, 3] = self._target + rotation @ (self._start[:3, 3] - self._target)
        viewpoint = Viewpoint.of(c2w, self._fov)
        message = {
            "type": "ViewerCameraMessage",
            "wxyz": viewpoint.wxyz.tolist(),
            "position": c2w[:3, 3].tolist(),
            "fov": self._fov,
            "near": 0.01,
            "far": 1000.0,
            "image_height": self._size[0],
            "image_width": self._size[1],
            "look_at": self._target.tolist(),
            "up_direction": [0.0, 0.0, 1.0],
        }
        await self._socket.send(msgspec.msgpack.encode(message))

    async def next_picture(self) -> float:
        """Waits for an image; returns its arrival time."""
        self._arrived.clear()
        await asyncio.wait_for(self._arrived.wait(), 120)
        return self.pictures[-1][0]

    async def _receive(self) -> None:
        decompressor = zstandard.ZstdDecompressor()
        async for data in self._socket:
            now = time.perf_counter()
            assert isinstance(data, bytes)
            packed = int.from_bytes(data[8:16], "little")
            inner = decompressor.decompress(data[16 : 16 + packed], max_output_size=int.from_bytes(data[:8], "little"))
            window = msgspec.msgpack.decode(inner)
            for message in window["messages"]:
                # The first such message clears the page.
                if message["type"] == "BackgroundImageMessage" and message["rgb_data"] is not None:
                    self.pictures.append((now, self._binary(data, 16 + packed, window, message["rgb_data"])))
                    self._arrived.set()

    @staticmethod
    def _binary(data: bytes, start: int, window: dict[str, Any], value: Any) -> bytes:
        """Returns the bytes that a message refers to or contains."""
        if isinstance(value, bytes):
            return value
        for index, length in enumerate(window["binaryBufferLengths"]):
            start = -(-start // 8) * 8
            if index == value["__binary_index"]:
                return data[start : start + length]
            start += length
        raise ValueError(f"rgb_data must be among the buffers, got {value}")


async def measure_throughput(client: Client, seconds: float) -> dict[str, Any]:
    """Moves the camera continuously."""
    began = time.perf_counter()
    first = None
    while (now := time.perf_counter()) - began < _WARM_UP_SECONDS + seconds:
        if first is None and now - began >= _WARM_UP_SECONDS:
            first = len(client.pictures)
        await client.move(0.3 * (now - began))
        await asyncio.sleep(1 / _MESSAGES_PER_SECOND)
    counted = client.pictures[first:]
    arrivals = [when for when, _ in counted]
    sizes = [Image.open(io.BytesIO(picture)).size for _, picture in counted]
    gaps = [b - a for a, b in pairwise(arrivals)]
    return {
        "frames_per_second": (len(arrivals) - 1) / (arrivals[-1] - arrivals[0]),
        "slowest_gap_ms": 1000 * max(gaps),
        "width": statistics.median(width for width, _ in sizes),
        "height": statistics.median(height for _, height in sizes),
        "kilobytes": statistics.median(len(picture) for _, picture in counted) / 1000,
    }


async def measure_latency(client: Client, count: int) -> dict[str, Any]:
    """Repeatedly moves the camera and waits for the image."""
    took = []
    for index in range(count):
        # An image of the camera at rest that is still in transit would be mistaken for the next one.
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(client.next_picture())
        await asyncio.sleep(0)
        began = time.perf_counter()
        await client.move(10 + 0.01 * index)
        took.append(await waiting - began)
    took.sort()
    return {
        "latency_ms": 1000 * statistics.median(took),
        "latency_95_ms": 1000 * took[int(0.95 * (len(took) - 1))],
    }


def measure(page: ViewerPage, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measures the images that a client receives, and stores the results in ``found``."""
    page.view.rows.value = options.size
    if options.rate is not None:
        page.view.rate.value = options.rate
    found["wished"] = float(page.view.rate.value)

    async def both(client: Client) -> None:
        found.update(await measure_throughput(client, options.seconds))
        found.update(await measure_latency(client, options.count))

    asyncio.run(Client(page, (options.size, options.size)).run(both))


def main() -> None:
    """Runs the measurements and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="a run directory, a checkpoint or a model file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", type=int, default=800, help="side of the square canvas, pixels")
    parser.add_argument("--rate", type=int, help="wished frames per second (default: as `voxelfield view`)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the measurement of frames per second")
    parser.add_argument("--count", type=int, default=100, help="of measurements of latency")
    parser.add_argument("--port", type=int, default=8095)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    served = Namespace(**vars(options), host="127.0.0.1", data_root=None, missing_images=None)
    found: dict[str, Any] = {}
    run_view(served, lambda page: measure(page, options, found))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    print(f"{device}, canvas {options.size} x {options.size}, {found['wished']:.0f} frames per second wished")
    print(
        f"moving: {found['frames_per_second']:.1f} frames per second of {found['width']:.0f} x {found['height']:.0f}, "
        f"{found['kilobytes']:.0f} kB each, slowest gap {found['slowest_gap_ms']:.0f} ms"
    )
    print(f"camera message to picture: {found['latency_ms']:.1f} ms, {found['latency_95_ms']:.1f} ms for 95 %")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
