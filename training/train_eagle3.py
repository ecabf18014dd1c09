"""Train the bundled EAGLE-3 head on features of the frozen target, by training-time test."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.checkpoint import load_llama, save_eagle3
from training.data import load_tokens, training_pairs
from training.eagle3 import Eagle3Config, Eagle3Head
from training.loop import add_arguments, autocast, loop_config, pick_device, run_steps
from training.losses import distillation_loss, maybe_compile
from training.model import LlamaConfig, LlamaForCausalLM, count_parameters
from training.unroll import DIAGONAL_SLOTS, drafted_hidden_states

logger = logging.getLogger(__name__)


def default_config(target: LlamaConfig, *, draft_vocab_size: int) -> Eagle3Config:
    """Return one layer of the target's shape that reads a low, a middle and a high layer.

    Layer ids name outputs, as in published heads: [1, n/2 - 1, n - 4] are the inputs of layers
    2, n/2 and n - 3.
    """
    decoder = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=1024,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
    )
    n = target.num_layers
    return Eagle3Config(
        decoder=decoder, draft_vocab_size=draft_vocab_size, aux_layer_ids=(1, n // 2 - 1, n - 4)
    )


def make_head(target: LlamaForCausalLM, tokens: Tensor, *, draft_vocab_size: int) -> Eagle3Head:
    """Return a head whose draft vocabulary is the most frequent tokens of the corpus."""
    config = default_config(target.config, draft_vocab_size=draft_vocab_size)
    head = Eagle3Head(config).to(tokens.device)
    counts = torch.bincount(tokens, minlength=target.config.vocab_size)
    hot = counts.argsort(descending=True, stable=True)[:draft_vocab_size]
    head.set_hot_tokens(hot)
    coverage = (counts[hot].sum() / counts.sum()).item()
    logger.info("%d hot tokens cover %.2f%% of the text", draft_vocab_size, 100 * coverage)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[head.hot_token_ids])
        head.norm.weight.copy_(target.model.norm.weight)
    return head


def restricted_probs(teacher_head: Tensor, teacher_hidden: Tensor, hot: Tensor) -> Tensor:
    """Return the target's probabilities of the hot tokens, not renormalised. [B, T, V_draft]."""
    probs = F.linear(teacher_hidden, teacher_head).float().softmax(-1)
    return probs[..., hot].bfloat16()


def training_test_losses(
    head: Eagle3Head,
    target: LlamaForCausalLM,
    tokens: Tensor,
    *,
    num_test_steps: int,
    step_weight: float,
    tokens_per_step: int,
    seed: int,
) -> Iterator[Tensor]:
    """Yield the loss of one batch after another.

    Row r of drafting step j predicts token r + j + 2, which the target predicts at r + j + 1.
    """
    device = tokens.device
    hot = head.hot_token_ids
    aux_layer_ids = head.config.aux_layer_ids
    teacher_function = maybe_compile(restricted_probs, device)
    loss_function = maybe_compile(
        lambda hidden, probs: distillation_loss(head.logits(hidden), probs), device
    )
    weights = [step_weight**j for j in range(num_test_steps)]
    for inputs, _ in training_pairs(tokens, tokens_per_step=tokens_per_step, seed=seed):
        num_rows = inputs.shape[1] - DIAGONAL_SLOTS
        with autocast(device):
            with torch.no_grad():
                output = target(inputs, aux_layer_ids)
                features = torch.cat(output.aux, dim=-1)[:, :num_rows]
                probs = teacher_function(target.lm_head.weight, output.hidden, hot)
                embeds = target.model.embed_tokens(inputs[:, 1:])
            drafted = drafted_hidden_states(
                head.midlayer,
                head.config.decoder,
                embeds,
                head.fc(features),
                num_steps=num_test_steps,
            )
            loss = sum(
                weight * loss_function(hidden, probs[:, j + 1 : j + 1 + num_rows])
                for j, (weight, hidden) in enumerate(zip(weights, drafted, strict=True))
            )
        yield loss / sum(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, num_steps=4040, learning_rate=2e-3, tokens_per_step=32768)
    parser.add_argument("--target", type=Path, default=Path("coppice/bundled/target"))
    parser.add_argument("--output", type=Path, default=Path("coppice/bundled/eagle3"))
    parser.add_argument("--draft-vocab-size", type=int, default=3072)
    parser.add_argument("--num-test-steps", type=int, default=7)
    parser.add_argument("--step-weight", type=float, default=0.85)
    args = parser.parse_args()
    if not 1 <= args.num_test_steps <= DIAGONAL_SLOTS:
        parser.error(f"--num-test-steps must be in 1..{DIAGONAL_SLOTS}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    device = pick_device()
    tokens = load_tokens(args.data_dir / "train.bin", device)
    target = load_llama(args.target, device).requires_grad_(requires_grad=False)
    head = make_head(target, tokens, draft_vocab_size=args.draft_vocab_size)
    logger.info("eagle3: %d parameters", count_parameters(head))
    if device.type == "cuda":
        target.compile_layers()
        head.midlayer.project = torch.compile(  # type: ignore[method-assign]
            head.midlayer.project, dynamic=False
        )
        head.midlayer.finish = torch.compile(  # type: ignore[method-assign]
            head.midlayer.finish, dynamic=False
        )
    losses = training_test_losses(
        head,
        target,
        tokens,
        num_test_steps=args.num_test_steps,
        step_weight=args.step_weight,
        tokens_per_step=args.tokens_per_step,
        seed=args.seed + 2,
    )
    run_steps(losses, head, loop_config(args))
    save_eagle3(args.output, head, args.data_dir / "tokenizer.json")


if __name__ == "__main__":
    main()
