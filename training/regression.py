"""Train a head that predicts the target's final hidden states, by training-time test."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.checkpoint import load_llama
from training.data import load_tokens, training_pairs
from training.deepseek import DeepseekMTPLayer
from training.final_hidden import EagleHead, MTPLayer
from training.loop import add_arguments, autocast, loop_config, pick_device, run_steps
from training.losses import distillation_loss, maybe_compile
from training.model import LlamaForCausalLM, count_parameters
from training.unroll import DIAGONAL_SLOTS, drafted_hidden_states

logger = logging.getLogger(__name__)


def parse_arguments(description: str, *, output: Path) -> argparse.Namespace:
    """Read the options that both heads have."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser, num_steps=1600, learning_rate=2e-3, tokens_per_step=16384)
    parser.add_argument("--target", type=Path, default=Path("coppice/bundled/target"))
    parser.add_argument("--output", type=Path, default=output)
    add_head_arguments(parser, num_test_steps=6)
    args = parser.parse_args()
    check_head_arguments(parser, args)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return args


def add_head_arguments(parser: argparse.ArgumentParser, *, num_test_steps: int) -> None:
    """Add the options of the training-time test."""
    parser.add_argument("--num-test-steps", type=int, default=num_test_steps)
    parser.add_argument("--step-weight", type=float, default=0.85)
    parser.add_argument("--regression-weight", type=float, default=0.1)


def check_head_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a message if an option of `add_head_arguments` is out of range."""
    if not 1 <= args.num_test_steps <= DIAGONAL_SLOTS:
        parser.error(f"--num-test-steps must be in 1..{DIAGONAL_SLOTS}")


def teacher_probs(teacher_head: Tensor, teacher_hidden: Tensor) -> Tensor:
    """Return the target's probabilities, [B, T, V]."""
    return F.linear(teacher_hidden, teacher_head).float().softmax(-1).bfloat16()


def hidden_loss(
    hidden: Tensor, teacher_hidden: Tensor, probs: Tensor, teacher_head: Tensor, weight: float
) -> Tensor:
    """Return the cross-entropy against the target, plus `weight` times the smooth L1 distance."""
    distance = F.smooth_l1_loss(hidden.float(), teacher_hidden.float())
    return distillation_loss(F.linear(hidden, teacher_head), probs) + weight * distance


def training_test_losses(
    head: EagleHead | MTPLayer | DeepseekMTPLayer,
    target: LlamaForCausalLM,
    tokens: Tensor,
    args: argparse.Namespace,
) -> Iterator[Tensor]:
    """Yield the loss of one batch after another.

    Row r of drafting step j stands for position r + j + 1: its hidden state should be the target's
    there, and so should its prediction of token r + j + 2.
    """
    device = tokens.device
    teacher_head = target.lm_head.weight
    teacher_function = maybe_compile(teacher_probs, device)
    loss_function = maybe_compile(hidden_loss, device)
    weights = [args.step_weight**j for j in range(args.num_test_steps)]
    pairs = training_pairs(tokens, tokens_per_step=args.tokens_per_step, seed=args.seed + 2)
    for inputs, _ in pairs:
        num_rows = inputs.shape[1] - DIAGONAL_SLOTS
        with autocast(device):
            with torch.no_grad():
                final = target(inputs).hidden
                probs = teacher_function(teacher_head, final)
                embeds = target.model.embed_tokens(inputs[:, 1:])
                if isinstance(head, MTPLayer):
                    embeds[:, 0] = 0
            drafted = drafted_hidden_states(
                head, head.config, embeds, final[:, :num_rows], num_steps=args.num_test_steps
            )
            loss = sum(
                weight
                * loss_function(
                    hidden,
                    final[:, j + 1 : j + 1 + num_rows],
                    probs[:, j + 1 : j + 1 + num_rows],
                    teacher_head,
                    args.regression_weight,
                )
                for j, (weight, hidden) in enumerate(zip(weights, drafted, strict=True))
            )
        yield loss / sum(weights)


def load_target_and_tokens(args: argparse.Namespace) -> tuple[LlamaForCausalLM, Tensor]:
    """Load what the head learns from, frozen."""
    device = pick_device()
    tokens = load_tokens(args.data_dir / "train.bin", device)
    return load_llama(args.target, device).requires_grad_(requires_grad=False), tokens


def train(
    head: EagleHead | MTPLayer,
    target: LlamaForCausalLM,
    tokens: Tensor,
    args: argparse.Namespace,
) -> None:
    """Train a head on features of the frozen target.

    Mutates: the parameters of `head`.
    """
    logger.info("%d parameters", count_parameters(head))
    if tokens.device.type == "cuda":
        target.compile_layers()
        head.project = torch.compile(head.project, dynamic=False)  # type: ignore[method-assign]
        head.finish = torch.compile(head.finish, dynamic=False)  # type: ignore[method-assign]
    run_steps(training_test_losses(head, target, tokens, args), head, loop_config(args))
