"""What a model keeps of every token, layer by layer. No torch here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What the caches of one layer hold of a token.

    Args:
        num_heads: KV heads.
        width: Values of a head.
        v_width: Values of a head of V; None: as many.
    """

    num_heads: int
    width: int
    v_width: int | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Return the values of a head of K, and of one of V."""
        return self.width, self.width if self.v_width is None else self.v_width


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The caches of a model. All layers have the same ones, of as many heads within a layer.

    Args:
        caches: Names of the caches of a layer: K and V, or the latent of which both are made.
        layers: Shape of the caches of each layer.
    """

    caches: tuple[str, ...] = ("k", "v")
    layers: tuple[CacheShape, ...]

    @classmethod
    def uniform(
        cls, num_layers: int, num_heads: int, width: int, *, caches: tuple[str, ...] = ("k", "v")
    ) -> KVLayout:
        """Return the layout of layers that are all alike."""
        shape = CacheShape(num_heads=num_heads, width=width)
        return cls(caches=caches, layers=(shape,) * num_layers)

    @property
    def num_layers(self) -> int:
        """Return how many layers have caches."""
        return len(self.layers)

    @property
    def has_latents(self) -> bool:
        """Return whether its caches hold latents, in the place of K and V."""
        return self.caches != ("k", "v")

    def cache_shapes(self, num_slots: int) -> list[list[tuple[int, int, int]]]:
        """Return the shape of every cache, layer by layer: [num_slots, heads, width]."""
        num_caches = len(self.caches)
        return [
            [(num_slots, shape.num_heads, width) for width in shape.widths[:num_caches]]
            for shape in self.layers
        ]

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory of a token in all caches of all layers.

        Args:
            itemsize: Bytes of a value.
        """
        shapes = itertools.chain.from_iterable(self.cache_shapes(1))
        return sum(num_heads * width for _, num_heads, width in shapes) * itemsize
