"""Train the bundled target on the corpus."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import save_llama
from training.data import load_tokens, training_pairs
from training.loop import add_arguments, autocast, loop_config, pick_device, run_steps
from training.losses import heldout_loss, maybe_compile, next_token_loss
from training.model import LlamaConfig, LlamaForCausalLM, count_parameters

logger = logging.getLogger(__name__)

# Width 256 and heads of 128 in groups of 4 to 1: an integer fraction of an 8B Llama's.
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=12,
    num_heads=4,
    num_kv_heads=1,
    head_dim=128,
)


def training_losses(
    model: LlamaForCausalLM, tokens: Tensor, *, tokens_per_step: int, seed: int
) -> Iterator[Tensor]:
    """Yield the loss of one batch after another."""
    loss_function = maybe_compile(next_token_loss, tokens.device)
    for inputs, targets in training_pairs(tokens, tokens_per_step=tokens_per_step, seed=seed):
        with autocast(tokens.device):
            loss = loss_function(model.lm_head.weight, model(inputs).hidden, targets)
        yield loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, num_steps=8500, learning_rate=3e-3)
    parser.add_argument("--output", type=Path, default=Path("coppice/bundled/target"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    device = pick_device()
    tokens = load_tokens(args.data_dir / "train.bin", device)
    model = LlamaForCausalLM(CONFIG).to(device)
    logger.info("target: %d parameters, %d training tokens", count_parameters(model), len(tokens))
    if device.type == "cuda":
        model.compile_layers()
    losses = training_losses(
        model, tokens, tokens_per_step=args.tokens_per_step, seed=args.seed + 1
    )
    num_steps = run_steps(losses, model, loop_config(args))
    epochs = num_steps * args.tokens_per_step / len(tokens)
    logger.info("%d steps, %.2f epochs", num_steps, epochs)
    save_llama(args.output, model, args.data_dir / "tokenizer.json")
    model.eval()
    for split in ("heldout", "heldout_cpython"):
        loss = heldout_loss(model, load_tokens(args.data_dir / f"{split}.bin", device))
        logger.info("%s loss %.4f", split, loss)


if __name__ == "__main__":
    main()
