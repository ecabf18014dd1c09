"""What a model keeps of every token, layer by layer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a cache of one layer holds of a token.

    Args:
        num_heads: KV heads.
        width: Values of a head.
    """

    num_heads: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The caches of a model. All layers have the same ones, of one shape within a layer.

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

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory of a token in all caches of all layers.

        Args:
            itemsize: Bytes of a value.
        """
        values = sum(shape.num_heads * shape.width for shape in self.layers)
        return values * len(self.caches) * itemsize
