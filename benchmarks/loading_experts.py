"""What the host does for a weight of an expert while a GPU is loaded, measured without a GPU.

    python -m benchmarks.loading_experts --output FILE

Writes models of many small experts in bfloat16 and in FP8 with scales for blocks, and loads their
experts as for a GPU: through memory that a GPU would read by itself, to where they stay. Weights
are so small that copies take next to nothing; what a GPU would be told to do, a CPU does at once.
Told is the median of all repeats for one weight and its scales: CPU time of all threads, that of
the thread that loads, and wall time, which other work on the machine lengthens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading_files import ModelShape, write_model
from benchmarks.machine import describe_machine
from shared.kernels.products_cpu import CpuProducts
from shared.models.checkpoint import CheckpointReader
from shared.models.config import ModelConfig
from shared.models.expert_weights import expert_stacks, load_expert_weights
from shared.models.tensor_reads import TensorReads

CPU = torch.device("cpu")
_STAGE_BYTES = 8 << 20
_PROJECTIONS = 3


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=20.0, help="of each checkpoint")
    parser.add_argument("--experts", type=int, default=128, help="of each layer")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--expert-width", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for is_fp8 in (False, True):
        shape = ModelShape(
            gigabytes=arguments.megabytes / 1e3,
            hidden_size=arguments.hidden_size,
            num_experts=arguments.experts,
            expert_width=arguments.expert_width,
            is_fp8=is_fp8,
        )
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place), shape)
            rows.append(measure(Path(place), arguments.repeat))
        rows[-1]["what"] = "experts in FP8 with scales" if is_fp8 else "experts in bfloat16"
        print(json.dumps(rows[-1]))  # noqa: T201
    if arguments.output is not None:
        document = {**describe_machine(), "threads": torch.get_num_threads(), "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


class StagedReader(CheckpointReader):
    """Loads to a CPU as to a GPU: in stages, and packs nothing."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, device=CPU, dtype=torch.bfloat16)
        self.products = _NothingPacked()
        self._reads = TensorReads(CPU, stage_bytes=_STAGE_BYTES)


class _NothingPacked(CpuProducts):
    def packs(self, values: torch.Tensor) -> bool:  # noqa: ARG002
        return False


def measure(directory: Path, repeat: int) -> dict[str, Any]:
    """Return the median times of one weight, microseconds."""
    config = ModelConfig.from_checkpoint(directory)
    experts = config.experts
    assert experts is not None
    num_weights = config.num_layers * experts.num_experts * _PROJECTIONS
    clocks = {
        "cpu_us": time.process_time,
        "loading_thread_us": time.thread_time,
        "wall_us": time.perf_counter,
    }
    spent: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(repeat):
        with StagedReader(directory) as reader:
            began = {name: clock() for name, clock in clocks.items()}
            for layer in range(config.num_layers):
                prefix = f"model.layers.{layer}.mlp"
                reader.read_ahead(expert_stacks(reader, prefix, experts))
                load_expert_weights(reader, prefix, experts, config.hidden_size)
            for name, clock in clocks.items():
                spent[name].append((clock() - began[name]) / num_weights * 1e6)
    medians = {name: statistics.median(times) for name, times in spent.items()}
    return {"weights": num_weights, "repeats": repeat, **medians}


if __name__ == "__main__":
    main()
