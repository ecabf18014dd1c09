"""Products that are wrong on purpose, as a vendor's BLAS may be: by a row's place or address."""

from __future__ import annotations

import torch

from shared.kernels.products_cpu import BatchLibrary, Blas


class PlaceSensitiveBlas(Blas):
    """Adds in another order for the last three rows of a tile, as a kernel for a tail does."""

    name = "a BLAS that minds places"

    def multiply_tile(self, tile: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Return the product of one tile."""
        out = super().multiply_tile(tile, held)
        out[5:] = torch.mm(tile[5:].flip(1), held.flip(1).t())
        return out


class AddressSensitiveBlas(Blas):
    """Adds in another order where a tile's memory is not aligned to a cache line."""

    name = "a BLAS that minds addresses"

    def multiply_tile(self, tile: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Return the product of one tile."""
        if tile.data_ptr() % 64 == 0:
            return super().multiply_tile(tile, held)
        return torch.mm(tile.flip(1), held.flip(1).t())


class PlaceSensitiveBatches(BatchLibrary):
    """Adds in another order for every item of a batch but the first two."""

    name = "batches that mind places"

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply a batch."""
        super().multiply(a, b, out)
        out[2:] = torch.bmm(a[2:].flip(2), b[2:].flip(1))
