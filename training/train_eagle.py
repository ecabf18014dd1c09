"""Train an EAGLE-1/2 head for the bundled target, to measure that kind; it is not bundled."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from training.checkpoint import save_eagle
from training.final_hidden import EagleHead
from training.regression import load_target_and_tokens, parse_arguments, train


def main() -> None:
    args = parse_arguments(__doc__, output=Path("build/drafts/eagle"))
    torch.manual_seed(args.seed)
    target, tokens = load_target_and_tokens(args)
    config = dataclasses.replace(target.config, num_layers=1, intermediate_size=1024)
    head = EagleHead(config).to(tokens.device)
    head.balance_inputs(target)
    train(head, target, tokens, args)
    save_eagle(args.output, head)


if __name__ == "__main__":
    main()
