"""Train a MiMo-style layer of multi-token prediction for the bundled target; it is not bundled.

Writes a MiMoForCausalLM checkpoint: the layer, and the target with biases of zero.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from training.checkpoint import save_mimo
from training.final_hidden import MTPLayer
from training.regression import load_target_and_tokens, parse_arguments, train


def main() -> None:
    args = parse_arguments(__doc__, output=Path("build/drafts/mtp"))
    torch.manual_seed(args.seed)
    target, tokens = load_target_and_tokens(args)
    head = MTPLayer(dataclasses.replace(target.config, num_layers=1)).to(tokens.device)
    train(head, target, tokens, args)
    save_mimo(args.output, target, head, args.target / "tokenizer.json")


if __name__ == "__main__":
    main()
