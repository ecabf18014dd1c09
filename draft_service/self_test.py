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
from shared.models.attention import ForwardInput
from shared.models.broken_tensors import describe_broken_tensors
from shared.step.packing import PackedRows, RowBlocks

_NUM_TOKENS = 16


def require_finite(runner: DraftRunner, directory: Path, *, max_num_tokens: int) -> None:
    """Read a fixed prompt.

    Args:
        directory: The draft's checkpoint, to name what is wrong with it.
        max_num_tokens: Longest prompt that fits, one token after it included; 2 or more.
    Raises: CheckpointError if a number is NaN or infinite; it names the tensors to blame.
    Mutates: nothing that outlives it.
    """
    numbers = _fixed_prompt_numbers(runner, min(_NUM_TOKENS, max_num_tokens - 1))
    num_broken = int((~numbers.isfinite()).sum())
    if num_broken:
        cause = describe_broken_tensors(directory, runner.model.dtype, is_draft=True)
        raise CheckpointError(
            f"{directory}: {num_broken} of {numbers.numel()} logits of the draft after a fixed "
            f"prompt are NaN or infinite; {cause}"
        )


def _fixed_prompt_numbers(runner: DraftRunner, num_rows: int) -> torch.Tensor:
    """Return the logits of the last row and, if a node below it is computed by layers of its own,
    what these return. [any] f32.
    """
    model, pool = runner.model, runner.pool
    tokens = np.random.default_rng(0).integers(0, runner.vocab_size, num_rows)
    row = pool.acquire()
    try:
        pool.reserve(row, num_rows + 1)
        bucket = runner.row_bucket(num_rows)
        host, fields = runner.packer.begin(
            RowBlocks(req_idx=[row], prefix_len=[0], num_rows=[num_rows]),
            np.arange(num_rows),
            num_rows,
            bucket,
        )
        host["token_ids"][:num_rows] = tokens
        host["last_rows"][:1] = num_rows - 1
        features = []
        if width := model.feature_spec.width:
            features = [FeatureRows.of(torch.ones(num_rows, width, dtype=model.dtype))]
        staged = stage_features(features, runner.packer.staging, bucket or num_rows)
        runner.packer.staging.flush()
        runner.launch_extend(DraftExtendInput(**fields, features=staged))
        hidden = runner.last_hidden[row : row + 1]
        with torch.inference_mode():
            numbers = model.logits(hidden)
            if model.kv_lag:
                below = _node_below(runner, row, num_rows)
                numbers = torch.cat((numbers, model.deepen(below, hidden, depth=1).float()), dim=1)
        hidden.zero_()
        return numbers[0]
    finally:
        pool.release(row)


def _node_below(runner: DraftRunner, row: int, num_rows: int) -> ForwardInput:
    """Return the input of a node below the last of a request's rows."""
    blocks = RowBlocks(req_idx=[row], prefix_len=[num_rows], num_rows=[1])
    _, fields = runner.packer.begin(blocks, np.array([num_rows]), 1, None)
    runner.packer.staging.flush()
    rows: PackedRows = fields["rows"]
    return rows.forward_input(fields["token_ids"], fields["position_ids"], runner.pool)
