"""What the training scripts share: optimizer, schedule, device, progress."""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    num_steps: int
    max_seconds: float  # the schedule is shortened to fit, judged by steps 20..100
    warmup_steps: int = 200
    learning_rate: float = 3e-3
    final_fraction: float = 0.05  # of the learning rate, at the end of the cosine
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    log_every: int = 200


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    num_steps: int,
    learning_rate: float,
    tokens_per_step: int = 65536,
) -> None:
    """Add the options that every training script has."""
    parser.add_argument("--data-dir", type=Path, default=Path("training/data"))
    parser.add_argument("--num-steps", type=int, default=num_steps)
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--tokens-per-step", type=int, default=tokens_per_step)
    parser.add_argument("--seed", type=int, default=0)


def loop_config(args: argparse.Namespace) -> LoopConfig:
    """Read the options of `add_arguments`."""
    return LoopConfig(
        num_steps=args.num_steps,
        max_seconds=args.max_seconds,
        warmup_steps=min(200, max(1, args.num_steps // 10)),
        learning_rate=args.learning_rate,
    )


def pick_device() -> torch.device:
    """Return the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocast(device: torch.device) -> torch.autocast:
    """Return the bf16 context that all training runs in."""
    return torch.autocast(device.type, dtype=torch.bfloat16)


def make_optimizer(module: nn.Module, config: LoopConfig) -> torch.optim.AdamW:
    """Return AdamW; norms are not decayed."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=torch.cuda.is_available()
    )


def learning_rate_at(step: int, num_steps: int, config: LoopConfig) -> float:
    """Linear warm-up, then a cosine down to `final_fraction`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    floor = config.final_fraction
    return config.learning_rate * (
        floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    )


def run_steps(losses: Iterator[Tensor], module: nn.Module, config: LoopConfig) -> int:
    """Take one optimizer step per loss.

    Args:
        losses: Yields the scalar loss of each step, computed when asked for.
        module: What is trained.
    Returns: the number of steps taken.
    Mutates: the parameters of `module`.
    """
    optimizer = make_optimizer(module, config)
    num_steps = config.num_steps
    start = time.monotonic()
    early = 0.0
    step = 0
    while step < num_steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, num_steps, config)
        loss = next(losses)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step in (20, 100):
            loss.item()  # waits for the device
            seconds = time.monotonic() - start
            if step == 100:
                per_step = (seconds - early) / 80
                affordable = 100 + (config.max_seconds - seconds) / per_step
                num_steps = int(min(num_steps, max(100, affordable)))
                logger.info("%.1f ms per step, %d steps", 1e3 * per_step, num_steps)
            early = seconds
        if step % config.log_every == 0 or step == num_steps:
            logger.info(
                "step %d loss %.4f grad %.2f %.0f s",
                step, loss.item(), norm.item(), time.monotonic() - start,
            )  # fmt: skip
    return step
