"""What the inputs of the output layers of the bundled target and head look like on real text."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.rows import build_rows, new_pool
from shared.kernels.fp8_rows import rows_of
from shared.kv.layout import KVLayout
from shared.models.attention import ForwardInput
from shared.models.config import feature_spec
from shared.models.eagle3 import Eagle3Draft
from shared.models.llama import CausalLM

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRows:
    """Normed final hidden rows, [n, d] f32 each."""

    target: torch.Tensor
    draft: torch.Tensor


def read_prompts(tokenizer_dir: Path, count: int) -> list[list[int]]:
    """Return token ids of the first held-out prompts."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    lines = PROMPTS.read_text().splitlines()[:count]
    return [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]


@functools.cache
@torch.inference_mode()
def final_hidden_rows(target_dir: Path, head_dir: Path, *, num_prompts: int = 24) -> HiddenRows:
    """Run the target and its EAGLE-3 head over held-out prompts, in float32 on the CPU, once.

    By one thread: many would wait for each other at every small product, for minutes when the
    machine is busy.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _final_hidden_rows(target_dir, head_dir, num_prompts)
    finally:
        torch.set_num_threads(num_threads)


def _final_hidden_rows(target_dir: Path, head_dir: Path, num_prompts: int) -> HiddenRows:
    _, spec = feature_spec(head_dir, target_dir, "eagle3")
    target = CausalLM.from_checkpoint(target_dir, _CPU, torch.float32)
    head = Eagle3Draft.from_checkpoint(
        head_dir,
        target_dir,
        spec,
        device=_CPU,
        dtype=torch.float32,
        context_len=target.config.max_position_embeddings,
    )
    target_rows, draft_rows = [], []
    for prompt in read_prompts(target_dir, num_prompts):
        rows = _chain(target.config.kv_layout, prompt)
        output = target.forward(rows, capture_layers=spec.layer_ids)
        assert output.captured is not None
        rows = _chain(head.kv_layout, prompt[1:])
        hidden = head.forward(rows, head.project_features(output.captured[:-1]))
        target_rows.append(output.hidden)
        draft_rows.append(hidden)
    normed = rows_of(head.normed(torch.cat(draft_rows)))
    return HiddenRows(target=torch.cat(target_rows), draft=normed)


def _chain(layout: KVLayout, token_ids: list[int]) -> ForwardInput:
    """Return the rows of a prompt over a pool of its own."""
    pool, req_idx = new_pool(
        layout,
        num_requests=1,
        num_tokens=len(token_ids),
        dtype=torch.float32,
        device=_CPU,
    )
    return build_rows(pool, req_idx, np.array([token_ids]))
