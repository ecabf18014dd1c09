"""How many KV pages a worker gets, and the longest sequence that they can hold."""

from __future__ import annotations

import torch

from shared.errors import ConfigError

CPU_POOL_BYTES = 512 * 1024 * 1024


def choose_num_pages(
    *,
    num_pages: int,
    bytes_per_page: int,
    page_size: int,
    max_num_requests: int,
    max_request_tokens: int,
    memory_fraction: float,
    device: torch.device,
) -> int:
    """Return the pages of the pool, sink included.

    Args:
        num_pages: The configured number; 0 = what memory allows, never more than all requests at
            their longest need.
        max_request_tokens: Longest sequence and its scratch slots, tokens.
        memory_fraction: Share of free GPU memory for the pool.
    Raises: ConfigError, with the numbers, if not even a small request fits.
    """
    if num_pages:
        return num_pages
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * memory_fraction)
    else:
        budget = CPU_POOL_BYTES
    affordable = budget // bytes_per_page
    wanted = 1 + max_num_requests * (-(-max_request_tokens // page_size) + 1)
    if affordable * page_size < 256:
        raise ConfigError(
            f"{budget / 1e9:.2f} GB are left for the KV pool: {affordable} pages of {page_size} "
            f"tokens ({bytes_per_page / 1e6:.2f} MB each). Free memory on {device}, raise "
            "--kv-memory-fraction or use a smaller model"
        )
    return min(affordable, wanted)


def require_room(*, num_bytes: int, what: str, device: torch.device) -> None:
    """Raise unless a GPU has room for weights.

    Args:
        num_bytes: Of the weights, as they will lie there.
        what: The checkpoint, for the message.
    Raises: ConfigError, with the numbers.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise ConfigError(
            f"{what} takes {num_bytes / 1e9:.1f} GB, {device} has {free / 1e9:.1f} GB of "
            f"{total / 1e9:.1f} GB free; free memory there, use another GPU or a smaller model"
        )
