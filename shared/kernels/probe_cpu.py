"""Start-up probes of a CPU's products: do a row's bits depend on anything but the row?

A row is multiplied alone, at every place of a tile among equal rows and among others, in every
number of rows around a tile, at odd addresses and out of strided memory. All must agree bit for
bit. What fails is replaced by the next way to multiply, down to the one that cannot fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from shared.kernels.products_cpu import (
    ALIGNED_VALUES,
    BATCH_ITEMS,
    GROUP_MULTIPLE,
    ROW_TILE,
    BatchLibrary,
    CpuProducts,
    CpuWeight,
    padded,
)
from shared.kernels.tree_attention_plan import CPU_KV_TILE

logger = logging.getLogger(__name__)

_ODD_OFFSETS = (1, 2, 3, 5, 7, 15)  # values: 4 to 60 bytes of float32
_ROW_COUNTS = (2, 3, 5, 7, 9, 17)


def settle_products(products: CpuProducts, *heads: tuple[int, int, int]) -> None:
    """Give up every way to multiply that fails a probe, and say so.

    Args:
        products: Of a loaded model.
        heads: (query heads of a KV head, values of a head, and of one of V) of its attention, once
            for each shape.
    Mutates: `products`.
    """
    while not products.linear.is_invariant:
        failed = [weight for weight in products.weights if not probe_weight(weight)]
        if not failed:
            break
        name = products.linear.name
        products.give_up_linear()
        logger.warning(
            "exactness: rows of %s's products have bits that depend on where they stand on this "
            "CPU (weight %s); weights are multiplied by %s from now on",
            name,
            list(failed[0].shape),
            _describe(products.linear.name),
        )
    while not products.attention.is_invariant:
        if all(probe_batches(products.attention, *shape) for shape in heads):
            break
        name = products.attention.name
        products.give_up_attention()
        logger.warning(
            "exactness: items of %s's batches have bits that depend on where they stand on this "
            "CPU; attention is multiplied by %s from now on",
            name,
            _describe(products.attention.name),
        )
    logger.info(
        "exactness: weights are multiplied by %s, attention by %s",
        products.linear.name,
        products.attention.name,
    )


def probe_weight(weight: CpuWeight) -> bool:
    """Return whether rows keep their bits wherever and among whichever others they stand."""
    generator = torch.Generator().manual_seed(0)
    width = weight.shape[1]
    others = torch.randn((2 * ROW_TILE + 1, width), generator=generator).to(weight.dtype)
    row = others[:1].clone()
    alone = weight.multiply(row)
    return all(
        torch.equal(weight.multiply(x)[place], alone[0]) for x, place in _placements(row, others)
    )


def _placements(row: torch.Tensor, others: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield rows, and where among them `row` stands."""
    width = row.shape[1]
    equal = row.expand(ROW_TILE, -1).contiguous()
    for place in range(ROW_TILE):
        yield equal, place
    for count in _ROW_COUNTS:
        x = others[:count].clone()
        x[-1] = row
        yield x, count - 1
    for offset in _ODD_OFFSETS:
        flat = torch.zeros(offset + 3 * width, dtype=row.dtype)[offset:].view(3, width)
        flat[1] = row
        yield flat, 1
    strided = torch.zeros((ROW_TILE, 2 * width + 1), dtype=row.dtype)[:, 1::2]
    strided[2] = row
    yield strided, 2


def probe_batches(library: BatchLibrary, group: int, head_dim: int, v_dim: int) -> bool:
    """Return whether items of attention's products keep their bits at every place of a batch.

    Args:
        group, head_dim, v_dim: Of the attention; all are padded as there.
    """
    generator = torch.Generator().manual_seed(0)
    group = padded(group, GROUP_MULTIPLE)
    head_dim, v_dim = padded(head_dim, ALIGNED_VALUES), padded(v_dim, ALIGNED_VALUES)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty((BATCH_ITEMS, a.shape[1], b.shape[2]))
        library.multiply(a, b, out)
        return out

    for width_k, width_n, is_transposed in (
        (head_dim, CPU_KV_TILE, True),
        (CPU_KV_TILE, v_dim, False),
    ):
        a, b = values(1, group, width_k), values(1, width_n, width_k).mT
        if not is_transposed:
            b = b.contiguous()
        shared = b.expand(BATCH_ITEMS, -1, -1)
        equal = product(a.expand(BATCH_ITEMS, -1, -1).contiguous(), shared)
        for place in range(BATCH_ITEMS):
            others = values(BATCH_ITEMS, group, width_k)
            others[place] = a[0]
            own = values(BATCH_ITEMS, width_n, width_k).mT
            own = own if is_transposed else own.contiguous()
            own[place] = b[0]
            for out in (equal, product(others, shared), product(others, own)):
                if not torch.equal(out[place], equal[0]):
                    return False
    return True


def _describe(name: str) -> str:
    return f"{name} arithmetic, slow as that is" if name == "elementwise" else name
