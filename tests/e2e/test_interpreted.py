"""A whole Generate by workers on the Triton kernels, interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import Server, checkpoint_config, generate_all, generate_alone, running
from tests.kernels.launches import counted_kernels
from tests.marks import EXHAUSTIVE, OLD_INTERPRETER

pytestmark = [
    EXHAUSTIVE,  # tests/kernels/test_engines.py has the engines of both workers, interpreted
    pytest.mark.skipif(OLD_INTERPRETER, reason="workers interpret with Triton 3.7 or numpy < 2.4"),
]

# Hot enough that the noise, which draft and target share, decides most tokens.
REQUESTS: list[dict[str, Any]] = [
    {
        "token_ids": [72, 101, 108],
        "max_new_tokens": 20,
        "ignore_eos": True,
        "seed": 1,
        "temperature": 4.0,
        "top_k": 200,
        "top_p": 0.98,
        "min_p": 0.0001,
        "speculation": True,
        "num_steps": 2,
        "topk": 3,
        "num_draft_tokens": 8,
    },
    {
        "token_ids": [72, 105],
        "max_new_tokens": 14,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "logprobs": True,
        "top_logprobs": 2,
        "speculation": True,
        "num_steps": 2,
        "topk": 2,
        "num_draft_tokens": 4,
    },
]


@pytest.fixture(scope="module")
def server(checkpoint_dir: Path) -> Iterator[Server]:
    """Serve a model of one layer whose workers run the Triton kernels on the CPU."""
    from tests.checkpoints import Shape, write_eagle3, write_llama

    target = write_llama(checkpoint_dir / "one-layer", shape=Shape(num_layers=1))
    draft = write_eagle3(checkpoint_dir / "one-layer-eagle3", target, layer_ids=(0, 0))
    # A short context and small steps: what a target computes at its start is no longer than that.
    short = {"max_context_len": 40, "max_batch_rows": 64}
    config = checkpoint_config(
        target, draft, "eagle3", target={"self_test": False, **short}, draft=short
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with running(config) as server:
            yield server


def test_every_kernel_runs_in_a_worker(server: Server) -> None:
    """Trees with filters and T > 0 on the interpreted kernels equal plain decoding on them."""
    plain = generate_alone(server.address, REQUESTS)
    completions = generate_all(server.address, REQUESTS)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    stats = [completion.speculation for completion in completions]
    assert all(one.num_draft_tokens > 0 for one in stats)
    assert sum(one.num_moved_rounds for one in stats) > 0

    launches = [dict(server.info(name).load.kernel_launches) for name in ("target-0", "draft-0")]
    launched = {name for counts in launches for name, count in counts.items() if count > 0}
    assert launched == counted_kernels()
