"""How fast weights are loaded from the page cache, and what of it is what.

    python -m benchmarks.loading --gigabytes 4 --directory /dev/shm --output FILE
    python -m benchmarks.loading --device cuda --gigabytes 20 --experts 128 --repeat 2 --output FILE

Writes a random model in bfloat16 or FP8, in shards, and measures in turn. A Llama on a CPU: memory
copied to fresh memory, which bounds all else; tensors read by the library of safetensors, copied
out of its mapping, and by `TensorReads`, as they are and as float32; the digest of every byte; a
whole model, which also packs its weights. On a GPU, and of experts: the page cache copied to pinned
memory, that to the GPU, and both at once, which bounds all else; tensors read by `TensorReads` one
by one, and ahead; a whole model, alone and beside the digest of every byte. Told is the least of
all repeats: wall time, which other work on the machine lengthens, and CPU time of all threads,
which it lengthens less.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.loading_copies import Copies
from benchmarks.loading_files import ModelShape, write_model
from benchmarks.machine import describe_machine
from shared.models.digest import HashCache, model_hash
from shared.models.llama import CausalLM
from shared.models.tensor_files import read_tensor_infos
from shared.models.tensor_reads import TensorReads

CPU = torch.device("cpu")
_COPIED_BYTES = 64 << 20
_STAGE_BYTES = 8 << 20

Ways = dict[str, Callable[[], object]]
"""What is measured. A thread that is returned is waited for afterwards."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a Llama")
    parser.add_argument("--expert-width", type=int, default=768)
    parser.add_argument("--fp8", action="store_true", help="with scales for blocks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    shape = ModelShape(
        gigabytes=arguments.gigabytes,
        hidden_size=arguments.hidden_size,
        num_experts=arguments.experts,
        expert_width=arguments.expert_width,
        is_fp8=arguments.fp8,
    )
    is_plain = device.type == "cpu" and not shape.num_experts and not shape.is_fp8
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        directory = Path(place)
        write_model(directory, shape)
        ways = cpu_ways(directory) if is_plain else staged_ways(directory, device)
        rows = measure(ways, directory, device, arguments.repeat)
    for row in rows:
        print(f"{row['what']:40} {row['wall_s']:7.2f} s {row['gb_per_s']:6.2f} GB/s", end="")  # noqa: T201
        print(f" {row['cpu_s']:7.2f} s of CPU")  # noqa: T201
    if arguments.output is not None:
        document = {**describe_machine(), "threads": torch.get_num_threads(), "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def cpu_ways(directory: Path) -> Ways:
    """Return how weights get to where a CPU multiplies by them."""
    infos = read_tensor_infos(directory)
    num_bytes = sum(info.end - info.start for info in infos.values())
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)

    def copy() -> object:
        return [source.clone() for _ in range(-(-num_bytes // _COPIED_BYTES))]

    def by_library(dtype: torch.dtype) -> object:
        tensors = []
        for file in sorted({info.file for info in infos.values()}):
            with safe_open(file, framework="pt", device="cpu") as opened:
                names = list(opened.keys())
                tensors += [opened.get_tensor(name).to(dtype, copy=True) for name in names]
        return tensors

    def by_reads(dtype: torch.dtype) -> object:
        reads = TensorReads(CPU)
        tensors = [reads.read(info, dtype) for info in infos.values()]
        reads.close()
        return tensors

    return {
        "copy to fresh memory": copy,
        "read by safetensors, copied": lambda: by_library(torch.bfloat16),
        "read by safetensors as float32": lambda: by_library(torch.float32),
        "read by TensorReads": lambda: by_reads(torch.bfloat16),
        "read by TensorReads as float32": lambda: by_reads(torch.float32),
        "digest": lambda: digest(directory),
        "model in bfloat16": lambda: CausalLM.from_checkpoint(directory, CPU, torch.bfloat16),
        "model in float32": lambda: CausalLM.from_checkpoint(directory, CPU, torch.float32),
    }


def staged_ways(directory: Path, device: torch.device) -> Ways:
    """Return how weights get to a GPU, through memory that it reads by itself."""
    infos = list(read_tensor_infos(directory).values())
    copies = Copies(sorted({info.file for info in infos}), device)

    def by_reads(*, is_ahead: bool) -> None:
        reads = TensorReads(device, stage_bytes=_STAGE_BYTES)
        if is_ahead:
            reads.read_ahead([info] for info in infos)
        for info in infos:
            reads.read(info, None)
        reads.close()

    def model() -> CausalLM:
        return CausalLM.from_checkpoint(directory, device, torch.bfloat16)

    def model_beside_digest() -> threading.Thread:
        thread = threading.Thread(target=digest, args=[directory])
        thread.start()
        model()
        return thread

    def model_and_digest() -> None:
        model_beside_digest().join()

    return {
        "page cache to pinned memory, 1 thread": lambda: copies.to_memory(1),
        "page cache to pinned memory, 8 threads": lambda: copies.to_memory(8),
        "pinned memory to the device": copies.to_device,
        "both at once, 8 threads": lambda: copies.through_memory(8),
        "read by TensorReads": lambda: by_reads(is_ahead=False),
        "read by TensorReads, ahead": lambda: by_reads(is_ahead=True),
        "digest": lambda: digest(directory),
        "model": model,
        "model, while its digest is computed": model_beside_digest,
        "model and its digest": model_and_digest,
    }


def digest(directory: Path) -> str:
    """Return the digest of a checkpoint, which no cache remembers."""
    return model_hash(directory, HashCache(Path(tempfile.mkdtemp(dir=directory))))


def measure(ways: Ways, directory: Path, device: torch.device, repeat: int) -> list[dict[str, Any]]:
    """Return the least time of each way, in turns."""
    infos = read_tensor_infos(directory)
    num_bytes = sum(info.end - info.start for info in infos.values())
    least = {name: (float("inf"), float("inf")) for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            if device.type == "cuda":  # memory is allocated anew, as at a start
                torch.cuda.empty_cache()
            began, used = time.perf_counter(), os.times()
            result = way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            wall, now = time.perf_counter() - began, os.times()
            if isinstance(result, threading.Thread):
                result.join()
            del result
            spent = max(0.0, now.user + now.system - used.user - used.system)
            least[name] = min(least[name][0], wall), min(least[name][1], spent)
    return [
        {
            "what": name,
            "gigabytes": num_bytes / 1e9,
            "wall_s": wall,
            "cpu_s": spent,
            "gb_per_s": num_bytes / 1e9 / wall,
        }
        for name, (wall, spent) in least.items()
    ]


if __name__ == "__main__":
    main()
