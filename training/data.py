"""Token streams on the training device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SHORT_LENGTH, LONG_LENGTH = 1024, 2048


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """Load a flat uint16 file of token ids as one int32 tensor.

    Raises: SystemExit if it is not there, with what makes it.
    """
    if not path.is_file():
        raise SystemExit(
            f"there is no {path}: python -m training.corpus, then python -m "
            "training.train_tokenizer, make it (training/README.md); --data-dir names its folder"
        )
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(device)


def iterate_chunks(tokens: Tensor, *, length: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield [batch_size, length] i64 chunks forever, every token once per epoch.

    Each epoch cuts the stream at a new random offset and visits the chunks in a new random order.
    """
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(length, device=tokens.device)
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        starts = torch.arange(offset, len(tokens) - length, length)
        starts = starts[torch.randperm(len(starts), generator=generator)].to(tokens.device)
        if len(starts) < batch_size:
            raise ValueError(f"{len(tokens)} tokens are too few for {batch_size} x {length}")
        for batch in starts[: len(starts) // batch_size * batch_size].split(batch_size):
            yield tokens[batch[:, None] + within].long()


def training_pairs(
    tokens: Tensor, *, tokens_per_step: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and next tokens, [B, T] each; every fourth batch has T = 2048, others 1024."""
    batch_size = max(1, tokens_per_step // LONG_LENGTH)
    chunks = iterate_chunks(tokens, length=LONG_LENGTH + 1, batch_size=batch_size, seed=seed)
    for step, chunk in enumerate(chunks):
        length = LONG_LENGTH if step % 4 == 3 else SHORT_LENGTH
        yield chunk[:, :-1].reshape(-1, length), chunk[:, 1:].reshape(-1, length)
