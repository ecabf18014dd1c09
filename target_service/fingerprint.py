"""What a target computes with: enough to tell whether another target gives the same bits.

The weights have a digest of their own (shared/models/digest.py); this is the rest: the device, the
versions, and the logits of a fixed prompt, which also show weights that compute no numbers at all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.errors import CheckpointError
from shared.models.broken_tensors import describe_broken_tensors
from target_service.runner import TargetRunner
from target_service.self_test import fixed_prompt_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Fields of WorkerInfo that decide about bits, beside model_hash, dtype and device."""

    device_model: str
    versions: str
    cpu_threads: int
    logits_hash: str


def take_fingerprint(runner: TargetRunner, directory: Path, *, max_num_tokens: int) -> Fingerprint:
    """Compute the logits of a fixed prompt and say what computed them.

    Args:
        directory, max_num_tokens: As of `finite_logits`.
    Raises: CheckpointError if a logit is NaN or infinite.
    """
    logits = finite_logits(runner, directory, max_num_tokens=max_num_tokens)
    device = runner.pool.device
    data = logits.float().contiguous().cpu().view(torch.uint8)
    return Fingerprint(
        device_model=device_model(device),
        versions=versions(device),
        cpu_threads=torch.get_num_threads() if device.type == "cpu" else 0,
        logits_hash=hashlib.sha256(data.numpy().tobytes()).hexdigest(),
    )


def finite_logits(runner: TargetRunner, directory: Path, *, max_num_tokens: int) -> torch.Tensor:
    """Return the logits of a fixed prompt, [n, vocab_size].

    Args:
        directory: The checkpoint, to name what is wrong with it.
        max_num_tokens: Longest prompt that fits.
    Raises: CheckpointError if a logit is NaN or infinite; it names the tensors to blame.
    """
    logits = fixed_prompt_logits(runner, max_num_tokens=max_num_tokens)
    num_broken = int((~logits.isfinite()).sum())
    if num_broken:
        raise CheckpointError(
            f"{directory}: {num_broken} of {logits.numel()} logits of a fixed prompt are NaN or "
            f"infinite; {describe_broken_tensors(directory, runner.model.dtype)}"
        )
    return logits


def device_model(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor with its instruction set."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def versions(device: torch.device) -> str:
    """Return the versions of what computes on a device."""
    try:
        own = importlib.metadata.version("coppice")
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        own = "unknown"
    parts = [f"coppice {own}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        import triton

        parts += [f"triton {triton.__version__}", f"CUDA {torch.version.cuda}"]
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
