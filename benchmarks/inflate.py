"""Inflate the bundled target and its EAGLE-3 head to the shape of a real model, as checkpoints.

Any engine loads them; they generate what the bundled models generate and accept as often, at the
cost of the large shape (see benchmarks/inflation.py).

    python -m benchmarks.inflate --out /dev/shm/8b
    coppice up --target-model /dev/shm/8b/target --draft-model /dev/shm/8b/eagle3

`--shape 30b-a3b` has the sizes of Qwen3-30B-A3B, 128 experts in each of 48 layers, as a Mixtral:
norms of q and k, which Qwen3 has, would change what the bundled target computes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.inflation import SHAPES, Checkpoint, Recipe, inflate_pair
from shared.models.checkpoint_names import resolve_model

TARGET, HEAD = "target", "eagle3"
MAX_SHARD_BYTES = 5 * 10**8
MAX_THREADS = 16
"""Shards written at once, each holding one of its tensors in memory."""
_COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def main() -> None:
    """Write the pair that the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    args = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)  # in each of those that write shards
    for role, checkpoint in inflate_bundled(args.shape).items():
        begun = time.perf_counter()
        num_bytes = write_checkpoint(checkpoint, args.out / role)
        seconds = time.perf_counter() - begun
        sys.stdout.write(
            f"{args.out / role}: {num_bytes / 1e9:.2f} GB, {num_bytes / 1e9 / seconds:.2f} GB/s\n"
        )
    sys.stdout.write(f"{time.perf_counter() - started:.0f} s\n")


def inflate_bundled(shape: str) -> dict[str, Checkpoint]:
    """Return the bundled pair in one of SHAPES, by role."""
    target, head = inflate_pair(
        SHAPES[shape], resolve_model("demo", TARGET), resolve_model("demo", HEAD)
    )
    return {TARGET: target, HEAD: head}


def write_checkpoint(checkpoint: Checkpoint, directory: Path, *, has_data: bool = True) -> int:
    """Write a Hugging Face checkpoint directory.

    Args:
        has_data: False: headers and holes, for InflatedReader.
    Returns: Bytes of its tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copy(checkpoint.base / name, directory / name)
    (directory / "config.json").write_text(json.dumps(checkpoint.fields, indent=2) + "\n")
    shards: list[dict[str, Recipe]] = [{}]
    used = total = 0
    for name, recipe in checkpoint.recipes.items():
        if used + recipe.num_bytes > MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = recipe
        used += recipe.num_bytes
        total += recipe.num_bytes
    if len(shards) == 1:
        _write_shard(directory / "model.safetensors", shards[0], has_data=has_data)
        return total
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        written = []
        for i, shard in enumerate(shards):
            file_name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            path = directory / file_name
            written.append(threads.submit(_write_shard, path, shard, has_data=has_data))
            weight_map |= dict.fromkeys(shard, file_name)
    for each in written:
        each.result()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _write_shard(path: Path, recipes: dict[str, Recipe], *, has_data: bool) -> None:
    """Write one safetensors file, tensor by tensor: a shard need not fit into memory.

    Tensors that are alike are made once for each shard.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, recipe in recipes.items():
        start, end = end, end + recipe.num_bytes
        dtype, shape = _DTYPES[recipe.dtype], list(recipe.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if has_data:
            alike: dict[str, torch.Tensor] = {}
            for name, recipe in recipes.items():
                tensor = alike.get(recipe.filler)
                if tensor is None:
                    tensor = recipe.make(name, torch.device("cpu"))
                if recipe.filler:
                    alike[recipe.filler] = tensor
                file.write(tensor.view(torch.uint8).numpy().data)
        else:
            file.truncate(file.tell() + end)


if __name__ == "__main__":
    main()
