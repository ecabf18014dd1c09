"""Measure the bundled models: held-out loss, and accept_length of both drafts.

accept_length counts the tokens that a round commits, the bonus token included, averaged over all
rounds of the target's completions of the held-out prompts, greedy and sampled. Trees rank by the
draft's own probabilities; no noise is shared with the target.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.checkpoint import load_eagle3, load_llama
from training.data import load_tokens
from training.draft_trees import (
    Draft,
    Eagle3Draft,
    StandaloneDraft,
    TreeShape,
    count_accepted,
    grow_trees,
)
from training.generate import generate
from training.loop import pick_device
from training.losses import heldout_loss
from training.model import LlamaForCausalLM, count_parameters

logger = logging.getLogger(__name__)

SHAPES = tuple(
    TreeShape(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)
    for num_steps, topk, num_draft_tokens in (
        (3, 1, 4), (5, 1, 6), (3, 2, 6), (5, 4, 16), (5, 8, 32), (6, 8, 64),
    )
)  # fmt: skip
LOOKAHEAD = 8  # tokens known beyond the last root: more than the deepest tree


def accept_lengths(accepted: Tensor, *, num_roots: int) -> list[int]:
    """Walk the rounds of one completion.

    Args:
        accepted: [num_roots], drafted tokens accepted if a round starts at that token.
    Returns: accept_length of each round, bonus included.
    """
    lengths = []
    root = 0
    while root < num_roots:
        lengths.append(int(accepted[root]) + 1)
        root += lengths[-1]
    return lengths


@torch.no_grad()
def measure_draft(
    draft: Draft,
    texts: list[Tensor],
    features: list[Tensor],
    prompt_lengths: list[int],
    shape: TreeShape,
) -> float:
    """Return the mean accept_length over all rounds of all completions.

    Args:
        texts: Prompt and greedy continuation, LOOKAHEAD tokens longer than what is measured.
        features: The target's features of the same tokens, [T, num_aux * hidden_size].
    """
    lengths: list[int] = []
    for text, feature, prompt_length in zip(texts, features, prompt_lengths, strict=True):
        if len(text) - LOOKAHEAD <= prompt_length:  # the text ended at once
            continue
        roots = torch.arange(prompt_length, len(text) - LOOKAHEAD, device=text.device)
        prefix = draft.read(text, feature)
        trees = grow_trees(draft, prefix, roots, shape)
        after = torch.arange(1, shape.num_steps + 1, device=text.device)
        accepted = count_accepted(trees, text[roots[:, None] + after])
        lengths += accept_lengths(accepted.cpu(), num_roots=len(roots))
    return sum(lengths) / len(lengths)


def cut_at_end_of_text(continuation: Tensor) -> int:
    """Return how many tokens come before the first end of text."""
    ends = (continuation == 0).nonzero()
    return int(ends[0]) if len(ends) else len(continuation)


def continue_prompts(
    target: LlamaForCausalLM, prompts: list[list[int]], *, num_tokens: int, temperature: float
) -> list[Tensor]:
    """Return each prompt with the target's continuation, cut at the end of text."""
    continuations = generate(target, prompts, num_tokens=num_tokens, temperature=temperature)
    return [
        torch.tensor(prompt + continuation[: cut_at_end_of_text(continuation)].tolist()).to(
            continuations.device
        )
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]


@torch.no_grad()
def target_features(
    target: LlamaForCausalLM, text: Tensor, aux_layer_ids: tuple[int, ...]
) -> Tensor:
    """Return the features of all tokens of a text, [T, num_aux * hidden_size]."""
    return torch.cat(target(text[None], aux_layer_ids).aux, dim=-1)[0]


def repeated_share(texts: list[Tensor], prompts: list[list[int]], *, window: int = 8) -> float:
    """Return the share of new tokens that end a window already seen in the same continuation.

    A small model that decodes greedily repeats itself, and repetition is easy to draft.
    """
    repeated = total = 0
    for text, prompt in zip(texts, prompts, strict=True):
        new_tokens = text[len(prompt) :].tolist()
        seen = set()
        for end in range(window, len(new_tokens) + 1):
            ngram = tuple(new_tokens[end - window : end])
            repeated += ngram in seen
            seen.add(ngram)
            total += 1
    return repeated / max(1, total)


def log_samples(target: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Show greedy completions of two short prompts."""
    for prompt in ("def fibonacci(n):", "import os\n\n\ndef read_lines(path):"):
        ids = tokenizer.encode(prompt).ids
        continuation = generate(target, [ids], num_tokens=96)[0]
        text = tokenizer.decode(ids + continuation[: cut_at_end_of_text(continuation)].tolist())
        logger.info("--- sample\n%s\n---", text)


def log_losses(models: dict[str, LlamaForCausalLM], data_dir: Path, device: torch.device) -> None:
    """Show the loss of every model on the encoded held-out text."""
    for split in ("heldout", "heldout_cpython"):
        tokens = load_tokens(data_dir / f"{split}.bin", device)
        for name, model in models.items():
            logger.info("%s loss on %s: %.4f", name, split, heldout_loss(model, tokens))


def log_table(columns: dict[str, list[float]]) -> None:
    """Show a column per draft and temperature, a line per shape."""
    logger.info("| num_steps/topk/num_draft_tokens | %s |", " | ".join(columns))
    logger.info("|---|%s", "---|" * len(columns))
    for shape, *values in zip(SHAPES, *columns.values(), strict=True):
        logger.info("| %s | %s |", shape, " | ".join(f"{value:.2f}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("coppice/bundled"))
    parser.add_argument("--prompts", type=Path, default=Path("benchmarks/prompts/heldout.jsonl"))
    parser.add_argument("--data-dir", type=Path, help="where the encoded held-out text is")
    parser.add_argument("--num-tokens", type=int, default=128, help="generated per prompt")
    parser.add_argument("--num-prompts", type=int, default=64)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = pick_device()
    target = load_llama(args.models / "target", device)
    standalone = load_llama(args.models / "standalone", device)
    head = load_eagle3(args.models / "eagle3", device)
    for name, module in (("target", target), ("standalone", standalone), ("eagle3", head)):
        logger.info("%s: %d parameters", name, count_parameters(module))
    if args.data_dir:
        log_losses({"target": target, "standalone": standalone}, args.data_dir, device)
    tokenizer = Tokenizer.from_file(str(args.models / "target" / "tokenizer.json"))
    log_samples(target, tokenizer)
    records = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    prompts = [tokenizer.encode(record["text"]).ids for record in records[: args.num_prompts]]
    prompt_lengths = [len(prompt) for prompt in prompts]
    logger.info(
        "accept_length, bonus included; %d prompts of %d to %d tokens, %d new tokens each",
        len(prompts), min(prompt_lengths), max(prompt_lengths), args.num_tokens,
    )  # fmt: skip
    drafts: dict[str, Draft] = {
        "eagle3": Eagle3Draft(head, target),
        "standalone": StandaloneDraft(standalone),
    }
    columns: dict[str, list[float]] = {}
    for temperature in (0.0, 1.0):
        texts = continue_prompts(
            target, prompts, num_tokens=args.num_tokens + LOOKAHEAD, temperature=temperature
        )
        logger.info("T = %g: %.0f%% repeated", temperature, 100 * repeated_share(texts, prompts))
        features = [target_features(target, text, head.config.aux_layer_ids) for text in texts]
        for name, draft in drafts.items():
            columns[f"{name}, T = {temperature:g}"] = [
                measure_draft(draft, texts, features, prompt_lengths, shape) for shape in SHAPES
            ]
    log_table(columns)


if __name__ == "__main__":
    main()
