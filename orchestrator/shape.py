"""Tree shape of requests that do not choose one."""

from __future__ import annotations

from shared.config import OrchestratorConfig
from shared.ladder import LADDER
from shared.messages import TreeShape

# The largest that a target may choose; relayed rounds have it always. Verifying a node costs a CPU
# about as much as decoding a token, and a GPU next to nothing as long as requests are few.
_CPU_SHAPE = TreeShape(num_steps=6, topk=2, num_draft_tokens=8)
_GPU_SHAPE = LADDER[-1]


def default_shape(config: OrchestratorConfig, device: str) -> TreeShape:
    """Resolve the configured tree shape for a target's device; it is always one that can grow.

    Args:
        device: As the target says it: "cpu", "cuda:0", ...
    """
    auto = _CPU_SHAPE if device.startswith("cpu") else _GPU_SHAPE
    shape = TreeShape(
        num_steps=config.num_steps or auto.num_steps,
        topk=config.topk or auto.topk,
        num_draft_tokens=config.num_draft_tokens or auto.num_draft_tokens,
    )
    return TreeShape(
        num_steps=shape.num_steps,
        topk=shape.topk,
        num_draft_tokens=min(shape.num_draft_tokens, shape.max_num_draft_tokens),
    )
