"""Train the bundled standalone draft: a small causal model distilled from the target."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.checkpoint import load_llama, save_llama
from training.data import load_tokens, training_pairs
from training.loop import add_arguments, autocast, loop_config, pick_device, run_steps
from training.losses import distillation_loss, heldout_loss, maybe_compile
from training.model import LlamaConfig, LlamaForCausalLM, count_parameters

logger = logging.getLogger(__name__)

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=384,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)


def head_distillation_loss(
    lm_head: Tensor, hidden: Tensor, teacher_head: Tensor, teacher_hidden: Tensor
) -> Tensor:
    """Return the cross-entropy against the teacher's distribution over the whole vocabulary."""
    teacher_probs = F.linear(teacher_hidden, teacher_head).float().softmax(-1)
    return distillation_loss(F.linear(hidden, lm_head), teacher_probs)


def distillation_losses(
    model: LlamaForCausalLM,
    target: LlamaForCausalLM,
    tokens: Tensor,
    *,
    tokens_per_step: int,
    seed: int,
) -> Iterator[Tensor]:
    """Yield the loss of one batch after another."""
    loss_function = maybe_compile(head_distillation_loss, tokens.device)
    for inputs, _ in training_pairs(tokens, tokens_per_step=tokens_per_step, seed=seed):
        with autocast(tokens.device):
            with torch.no_grad():
                teacher_hidden = target(inputs).hidden
            hidden = model(inputs).hidden
            loss = loss_function(
                model.lm_head.weight, hidden, target.lm_head.weight, teacher_hidden
            )
        yield loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, num_steps=4000, learning_rate=4e-3)
    parser.add_argument("--target", type=Path, default=Path("coppice/bundled/target"))
    parser.add_argument("--output", type=Path, default=Path("coppice/bundled/standalone"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    device = pick_device()
    tokens = load_tokens(args.data_dir / "train.bin", device)
    target = load_llama(args.target, device).requires_grad_(requires_grad=False)
    model = LlamaForCausalLM(CONFIG).to(device)
    logger.info("standalone: %d parameters", count_parameters(model))
    if device.type == "cuda":
        model.compile_layers()
        target.compile_layers()
    losses = distillation_losses(
        model, target, tokens, tokens_per_step=args.tokens_per_step, seed=args.seed + 3
    )
    run_steps(losses, model, loop_config(args))
    save_llama(args.output, model, args.data_dir / "tokenizer.json")
    for split in ("heldout", "heldout_cpython"):
        loss = heldout_loss(model, load_tokens(args.data_dir / f"{split}.bin", device))
        logger.info("%s loss %.4f", split, loss)


if __name__ == "__main__":
    main()
