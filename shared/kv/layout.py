"""What a model keeps of every token, layer by layer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The caches of a model; all layers have the same ones, and all caches the same shape.

    Args:
        caches: Names of the caches of a layer: K and V, or the latent of which both are made.
        num_heads: KV heads.
        width: Values of a token in a head of a cache.
    """

    num_layers: int
    caches: tuple[str, ...] = ("k", "v")
    num_heads: int
    width: int

    @property
    def has_latents(self) -> bool:
        """Return whether its caches hold latents, in the place of K and V."""
        return self.caches != ("k", "v")

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the memory of a token in all caches of all layers.

        Args:
            itemsize: Bytes of a value.
        """
        return self.num_layers * len(self.caches) * self.num_heads * self.width * itemsize
