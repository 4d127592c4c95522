"""Times networks and frames on a GPU whose shared memory is artificially limited to that of smaller GPUs.

    python benchmarks/shared_memory.py [RUN] [--limits BYTES [BYTES ...]] [--rounds N] [--quick] [--json PATH]

Rows are the networks of the default preset on 2^18 rows, forward and backward, a deeper network, and the frames of RUN
(a run directory or a checkpoint, rendered as in ``benchmarks/render.py``), if given.

- A process reads its limit from ``VOXELFIELD_SHARED_MEMORY_LIMIT`` when it first launches a kernel, so each limit is
  measured in separate processes. They alternate with processes without a limit, ``--rounds`` of each.
- Times are medians over rounds of each process's median. The ratio is relative to the time without a limit.
- The default limits are those of compute capability 8.0; 8.6, 8.9 and 12.0; and 7.5. The GPU still has its own clocks
  and caches, so a ratio shows the cost of the other code path, not the speed of such a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import _harness as harness
import torch
from _run_scene import load_run_scene
from torch import Tensor

import voxelfield
from voxelfield.evaluation.evaluation import evenly_spaced
from voxelfield.ops import mlp
from voxelfield.training.execution import synchronized_time

LIMITS = (166912, 101376, 65536)
ROWS = 1 << 18
NETWORKS = {
    "density (24, 128, 16)": (24, 128, 16),
    "colour (32, 128, 128, 128, 3)": (32, 128, 128, 128, 3),
    "deep (32, 8 x 128, 3)": (32, *[128] * 8, 3),
}
FRAMES = 50

Times = dict[str, float]


def network_calls(sizes: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Returns a network's forward and backward pass on one input."""
    device = torch.device("cuda")
    weights = [torch.randn(out, into, device=device) * (2 / into) ** 0.5 for into, out in pairwise(sizes)]
    input = torch.randn(ROWS, sizes[0], device=device, dtype=torch.float16)
    grad = torch.randn(ROWS, sizes[-1], device=device, dtype=torch.float16)

    def backward() -> tuple[Tensor, list[Tensor]]:
        result: tuple[Tensor, list[Tensor]] = torch.ops.voxelfield.mlp_backward(grad, input, weights, None)
        return result

    return {"forward": lambda: mlp(input, weights), "backward": backward}


def frame_times(path: Path, data_root: Path | None) -> float:
    """Returns the median milliseconds of a run's frames."""
    device = torch.device("cuda")
    trained = voxelfield.load(path, device)
    cameras = load_run_scene(trained, "test", data_root).test.cameras.to(device)
    views = evenly_spaced(FRAMES, len(cameras))
    renderer = trained.renderer()
    times = []
    for index in [*views, *views]:
        began = synchronized_time(device)
        renderer.view(cameras, index)
        times.append(1e3 * (synchronized_time(device) - began))
    return statistics.median(times[len(views) :])


def measure(options: argparse.Namespace) -> Times:
    """Measures everything under the limit of this process."""
    how = harness.effort(torch.device("cuda"), options.quick)
    times: Times = {}
    with torch.no_grad():
        for name, sizes in NETWORKS.items():
            for part, call in network_calls(sizes).items():
                times[f"{name} {part}"] = harness.measure([call], torch.device("cuda"), how).median
    if options.run is not None:
        times["frame"] = frame_times(options.run, options.data_root)
    return times


def measure_in_process(arguments: list[str], limit: int | None) -> Times:
    """Measures in a new process under a limit."""
    environment = {name: value for name, value in os.environ.items() if name != "VOXELFIELD_SHARED_MEMORY_LIMIT"}
    if limit is not None:
        environment["VOXELFIELD_SHARED_MEMORY_LIMIT"] = str(limit)
    command = [sys.executable, __file__, *arguments, "--measure"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: Times = json.loads(done.stdout.splitlines()[-1])
    return times


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, measures in separate processes, and prints the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run directory or a checkpoint")
    parser.add_argument("--data-root", type=Path, help="folder of scenes; default: data.root of the run")
    parser.add_argument("--limits", type=int, nargs="+", default=LIMITS, metavar="BYTES", help="bytes a block may use")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each limit (default: 3)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="file for every figure")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.measure:
        print(json.dumps(measure(options)))
        return
    limits: tuple[int | None, ...] = (None, *options.limits)
    rounds = [[measure_in_process(given, limit) for limit in limits] for _ in range(options.rounds)]
    rows = []
    for name in rounds[0][0]:
        own = [statistics.median(times[column][name] for times in rounds) for column in range(len(limits))]
        rows.append([name, f"{own[0]:.3f}", *(f"{ms:.3f} ({ms / own[0]:.2f}x)" for ms in own[1:])])
    print(harness.table(["ms", "no limit", *map(str, options.limits)], rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"limits": limits, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
