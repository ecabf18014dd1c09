"""Layers with and without a sliding window in one model: attention is planned once per window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.kernels import tree_attention_cpu
from shared.kernels.dispatch import launch_counts, use_triton
from shared.models.llama import CausalLM
from tests import checkpoints
from tests.checkpoints import Shape, edit_checkpoint
from tests.paged import Block, PagedKV

SHAPE = Shape(num_layers=2, num_heads=2, num_kv_heads=1)
WINDOW = 6


def write(directory: Path, kinds: str) -> Path:
    """Write a Mistral whose layers have a window ("w") or none ("-")."""
    checkpoints.write_mistral(directory, shape=SHAPE, sliding_window=WINDOW)
    names = {"w": "sliding_attention", "-": "full_attention"}
    return edit_checkpoint(
        directory, config=lambda c: c.update(layer_types=[names[kind] for kind in kinds])
    )


class Runner:
    """One request on one device."""

    def __init__(self, directory: Path, device: torch.device, **options: int) -> None:
        self.model = CausalLM.from_checkpoint(directory, device, torch.float32, **options)
        self.kv = PagedKV(self.model.config.kv_layout, device=device)
        self.device = device

    @torch.inference_mode()
    def logits(
        self,
        prefix_len: int,
        tokens: list[int],
        paths: list[list[int]] | None = None,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the logits of a chain, or of a tree, after a prefix.

        Args:
            window: Of the forward, beside what layers have; None: the model's.
        """
        block = Block(req_idx=0, prefix_len=prefix_len, num_rows=len(tokens), paths=paths)
        window = self.model.config.sliding_window if window is None else window
        output = self.model.forward(self.kv.rows(tokens, [block], window=window))
        return self.model.logits(output.hidden)


@pytest.mark.parametrize(("kinds", "num_plans"), [("ww", 1), ("--", 1), ("w-", 2)])
def test_attention_is_planned_once_per_window(
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    kinds: str,
    num_plans: int,
) -> None:
    planned = []
    plan_rows = tree_attention_cpu.plan_rows

    def counted(*args, **options):
        planned.append(args)
        return plan_rows(*args, **options)

    monkeypatch.setattr(tree_attention_cpu, "plan_rows", counted)
    runner = Runner(write(tmp_path, kinds), device)
    before = launch_counts().get("tree_attention_schedule", 0)
    runner.logits(0, [1, 2, 3])
    num_launched = launch_counts().get("tree_attention_schedule", 0) - before
    assert (num_launched if use_triton(runner.kv.layers[0][0]) else len(planned)) == num_plans


def test_rows_see_what_their_layer_lets_them_see(tmp_path: Path, device: torch.device) -> None:
    """Chunks, decoding and a tree's path have the same bits; a window in some layers is neither
    one in all of them nor in none."""
    tokens = [(7 * i) % 50 for i in range(12)]
    runner = Runner(write(tmp_path / "mixed", "w-"), device)
    whole = runner.logits(0, tokens)
    again = Runner(tmp_path / "mixed", device)
    parts = [again.logits(0, tokens[:9])]
    parts += [again.logits(i, tokens[i : i + 1]) for i in range(9, 12)]
    assert torch.equal(torch.cat(parts), whole)
    # Nodes 0, 2, 4 are the truth.
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    tree = [tokens[9], 3, tokens[10], 5, tokens[11]]
    assert torch.equal(again.logits(9, tree, paths)[[0, 2, 4]], whole[9:])
    for name, kinds in (("all", "ww"), ("none", "--")):
        other = Runner(write(tmp_path / name, kinds), device).logits(0, tokens)
        # The first rows see everything through any window.
        torch.testing.assert_close(other[:WINDOW], whole[:WINDOW], atol=1e-5, rtol=0)
        assert (other[WINDOW:] - whole[WINDOW:]).abs().amax(-1).min() > 1e-3


def test_a_window_that_no_context_fills_is_none(tmp_path: Path, device: torch.device) -> None:
    directory = write(tmp_path, "w-")
    edit_checkpoint(directory, config=lambda c: c.update(sliding_window=1000))
    before = launch_counts().get("tree_attention_schedule", 0)
    runner = Runner(directory, device, context_len=100)
    runner.logits(0, [1, 2, 3])
    num_launched = launch_counts().get("tree_attention_schedule", 0) - before
    assert num_launched == int(use_triton(runner.kv.layers[0][0]))


def test_a_forward_may_see_less_than_its_layers(tmp_path: Path, device: torch.device) -> None:
    """As a draft whose pool is small: its window goes before wider ones of layers, not others."""
    tokens = [(7 * i) % 50 for i in range(10)]
    mixed = write(tmp_path / "mixed", "w-")
    for window in (WINDOW - 2, WINDOW + 2):
        narrow = write(tmp_path / f"narrow-{window}", "ww")
        edit_checkpoint(narrow, config=lambda c, w=window: c.update(sliding_window=w))
        got = Runner(mixed, device).logits(0, tokens, window=window)
        all_narrow = Runner(narrow, device).logits(0, tokens)
        assert torch.equal(got, all_narrow) == (window < WINDOW)
