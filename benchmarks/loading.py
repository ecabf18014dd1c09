"""How fast weights are loaded from the page cache on a CPU, and what of it is what.

    python -m benchmarks.loading --gigabytes 4 --directory /dev/shm --output FILE

Writes a random Llama in bfloat16, in shards, reads it once, and measures in turn: memory copied to
fresh memory, which bounds all else; tensors read by the library of safetensors, copied out of its
mapping, and by `TensorReads`, as they are and as float32; the digest of every byte; a whole model,
which also packs its weights. Told is the least of all repeats: wall time, which other work on the
machine lengthens, and CPU time of all threads, which it lengthens less.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.machine import describe_machine
from shared.models.digest import HashCache, model_hash
from shared.models.llama import CausalLM
from shared.models.tensor_files import read_tensor_infos
from shared.models.tensor_reads import TensorReads

CPU = torch.device("cpu")
_VOCABULARY = 8192
_COPIED_BYTES = 64 << 20


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        directory = Path(place)
        write_llama(directory, arguments.gigabytes, arguments.hidden_size)
        rows = measure(directory, arguments.repeat)
    for row in rows:
        print(f"{row['what']:40} {row['wall_s']:7.2f} s {row['gb_per_s']:6.2f} GB/s", end="")  # noqa: T201
        print(f" {row['cpu_s']:7.2f} s of CPU")  # noqa: T201
    if arguments.output is not None:
        document = {**describe_machine(), "threads": torch.get_num_threads(), "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def write_llama(directory: Path, gigabytes: float, hidden: int) -> None:
    """Write a LlamaForCausalLM of about so many bytes, a shard per layer."""
    inner, num_heads = 4 * hidden, max(1, hidden // 128)
    kv_width = 128 * max(1, num_heads // 4)
    sizes = {
        "self_attn.q_proj": (128 * num_heads, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, 128 * num_heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layer_bytes = 2 * sum(torch.Size(size).numel() for size in sizes.values())
    num_layers = max(1, round((gigabytes * 1e9 - 4 * _VOCABULARY * hidden) / layer_bytes))
    weight_map: dict[str, str] = {}

    def write(shard: int, shapes: dict[str, tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(shard)
        tensors = {
            f"{name}.weight": torch.randn(size, generator=generator).mul_(0.02).bfloat16()
            for name, size in shapes.items()
        }
        name = f"model-{shard:05d}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    vocabulary = (_VOCABULARY, hidden)
    write(0, {"model.embed_tokens": vocabulary, "lm_head": vocabulary, "model.norm": (hidden,)})
    for layer in range(num_layers):
        write(layer + 1, {f"model.layers.{layer}.{name}": size for name, size in sizes.items()})
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_width // 128,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))


def measure(directory: Path, repeat: int) -> list[dict[str, Any]]:
    """Return the least time of each way, in turns."""
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

    def digest() -> object:
        with tempfile.TemporaryDirectory() as cache:
            return model_hash(directory, HashCache(Path(cache)))

    ways: dict[str, Callable[[], object]] = {
        "copy to fresh memory": copy,
        "read by safetensors, copied": lambda: by_library(torch.bfloat16),
        "read by safetensors as float32": lambda: by_library(torch.float32),
        "read by TensorReads": lambda: by_reads(torch.bfloat16),
        "read by TensorReads as float32": lambda: by_reads(torch.float32),
        "digest": digest,
        "model in bfloat16": lambda: CausalLM.from_checkpoint(directory, CPU, torch.bfloat16),
        "model in float32": lambda: CausalLM.from_checkpoint(directory, CPU, torch.float32),
    }
    least = {name: (float("inf"), float("inf")) for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            began, used = time.perf_counter(), os.times()
            way()
            wall, now = time.perf_counter() - began, os.times()
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
