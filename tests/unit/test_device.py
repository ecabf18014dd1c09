"""What a worker takes for its device where its options do not say."""

from __future__ import annotations

import pytest
import torch

from shared.config import DraftConfig, OrchestratorConfig, TargetConfig
from shared.device import max_num_requests


@pytest.mark.parametrize("config_type", [TargetConfig, DraftConfig])
@pytest.mark.parametrize(("device", "expected"), [("cpu", 64), ("cuda", 256)])
def test_a_gpu_holds_more_requests(
    config_type: type[TargetConfig] | type[DraftConfig], device: str, expected: int
) -> None:
    assert max_num_requests(config_type(), torch.device(device)) == expected
    assert max_num_requests(config_type(max_num_requests=7), torch.device(device)) == 7


def test_a_wave_waits_instead_of_being_refused() -> None:
    """The orchestrator admits what a GPU holds, and three times as many beside it."""
    held = max_num_requests(TargetConfig(), torch.device("cuda"))
    assert OrchestratorConfig().max_num_requests == 4 * held
