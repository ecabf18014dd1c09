"""Start-up proof that a draft computes numbers.

One that does not grows no tree: its requests would be served without speculation, and nothing would
say why.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from draft_service.extend_input import stage_features
from draft_service.features import FeatureRows
from draft_service.phases import DraftExtendInput
from draft_service.runner import DraftRunner
from shared.errors import CheckpointError
from shared.models.broken_tensors import blame_tensors
from shared.step.packing import RowBlocks

_NUM_TOKENS = 16


def require_finite(runner: DraftRunner, directory: Path, *, max_num_tokens: int) -> None:
    """Read a fixed prompt.

    Args:
        directory: The draft's checkpoint, to name what is wrong with it.
        max_num_tokens: Longest prompt that fits.
    Raises: CheckpointError if a logit is NaN or infinite; it names the tensors to blame.
    Mutates: nothing that outlives it.
    """
    logits = _fixed_prompt_logits(runner, min(_NUM_TOKENS, max_num_tokens))
    num_broken = int((~logits.isfinite()).sum())
    if num_broken:
        raise CheckpointError(
            f"{directory}: {num_broken} of {logits.numel()} logits of the draft after a fixed "
            f"prompt are NaN or infinite; {blame_tensors(directory, runner.model.dtype)}"
        )


def _fixed_prompt_logits(runner: DraftRunner, num_rows: int) -> torch.Tensor:
    """Return the logits of the last row, [draft ids]."""
    model, pool = runner.model, runner.pool
    tokens = np.random.default_rng(0).integers(0, runner.vocab_size, num_rows)
    row = pool.acquire()
    try:
        pool.reserve(row, num_rows)
        blocks = RowBlocks(req_idx=[row], prefix_len=[0], num_rows=[num_rows])
        bucket = runner.row_bucket(num_rows)
        host, fields = runner.packer.begin(blocks, np.arange(num_rows), num_rows, bucket)
        host["token_ids"][:num_rows] = tokens
        host["last_rows"][:1] = num_rows - 1
        features = []
        if width := model.feature_spec.width:
            features = [FeatureRows.of(torch.ones(num_rows, width, dtype=model.dtype))]
        staging = runner.packer.staging
        staged = stage_features(features, staging, bucket or num_rows)
        staging.flush()
        runner.launch_extend(DraftExtendInput(**fields, features=staged))
        hidden = runner.last_hidden[row : row + 1]
        with torch.inference_mode():
            logits = model.logits(hidden)[0]
        hidden.zero_()
        return logits
    finally:
        pool.release(row)
