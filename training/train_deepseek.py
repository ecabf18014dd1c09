"""Train a small DeepSeek-V3 and its layer of multi-token prediction; it is not bundled.

Writes a DeepseekV3ForCausalLM checkpoint: first the target is trained on the corpus, then the layer
on the final hidden states of the frozen target. A GPU is not needed.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from training.checkpoint import save_deepseek
from training.data import load_tokens
from training.deepseek import (
    DeepseekConfig,
    DeepseekForCausalLM,
    DeepseekMTPLayer,
    balanced,
)
from training.loop import add_arguments, loop_config, pick_device, run_steps
from training.losses import heldout_loss
from training.model import count_parameters
from training.regression import add_head_arguments, check_head_arguments, training_test_losses
from training.train_target import training_losses

logger = logging.getLogger(__name__)

CONFIG = DeepseekConfig(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=384,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    nope_dim=32,
    value_dim=32,
    query_rank=96,
    latent_rank=64,
    num_experts=8,
    num_experts_per_token=2,
    expert_size=128,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, num_steps=600, learning_rate=4e-3, tokens_per_step=2048)
    add_head_arguments(parser, num_test_steps=3)
    parser.add_argument("--output", type=Path, default=Path("build/drafts/deepseek"))
    args = parser.parse_args()
    check_head_arguments(parser, args)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    device = pick_device()
    tokens = load_tokens(args.data_dir / "train.bin", device)
    target = DeepseekForCausalLM(CONFIG).to(device)
    logger.info("target: %d parameters, %d training tokens", count_parameters(target), len(tokens))
    losses = training_losses(
        target, tokens, tokens_per_step=args.tokens_per_step, seed=args.seed + 1
    )
    run_steps(balanced(losses, target), target, loop_config(args))
    target.eval().requires_grad_(requires_grad=False)
    layer = DeepseekMTPLayer(CONFIG).to(device)
    logger.info("MTP layer: %d parameters", count_parameters(layer))
    losses = training_test_losses(layer, target, tokens, args)
    run_steps(balanced(losses, layer), layer, loop_config(args))
    save_deepseek(args.output, target, layer, args.data_dir / "tokenizer.json")
    heldout = load_tokens(args.data_dir / "heldout.bin", device)
    loss = heldout_loss(target, heldout, max_tokens=32 * 1024)
    logger.info("held-out loss %.4f", loss)


if __name__ == "__main__":
    main()
