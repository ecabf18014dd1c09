"""An output layer that proposes the tokens of a few clusters alone, which centroids choose."""

from __future__ import annotations

import torch

from shared.errors import CheckpointError
from shared.kernels.linear import linear
from shared.models.assistant_config import ClusterConfig
from shared.models.checkpoint import CheckpointReader


class TokenClusters:
    """Clusters of equally many tokens, of which a row's hidden state chooses some.

    Args:
        reader: Of an assistant's checkpoint.
        hidden_size: Values of a centroid.
    Raises: CheckpointError naming what is missing or mis-shaped.
    """

    def __init__(
        self, reader: CheckpointReader, config: ClusterConfig, vocab_size: int, hidden_size: int
    ) -> None:
        self._num_chosen = config.num_chosen
        self._centroids = reader.load_weight(
            "masked_embedding.centroids.weight", (config.num_clusters, hidden_size)
        )
        # The tokens of all clusters, one cluster after the other.
        tokens = reader.load_int64("masked_embedding.token_ordering", (vocab_size,))
        ids = torch.arange(vocab_size, device=tokens.device)
        if not torch.equal(tokens.sort().values, ids):
            raise CheckpointError(
                f"{reader.directory}: tensor 'masked_embedding.token_ordering' must name each of "
                f"{vocab_size} tokens once"
            )
        size = vocab_size // config.num_clusters
        self._cluster_of_token = torch.empty_like(tokens).scatter_(0, tokens, ids // size)

    def keep_chosen(self, logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows, those of tokens in other clusters below all the rest.

        Args:
            logits: [R, V] f32.
            hidden: [R, hidden_size], what the output layer read.
        """
        scores = linear(hidden, self._centroids, out_dtype=torch.float32)
        chosen = scores.topk(self._num_chosen, dim=1).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, value=True)
        is_kept = is_chosen[:, self._cluster_of_token]
        lowest = logits.masked_fill(~is_kept, torch.inf).amin(dim=1, keepdim=True)
        return torch.where(is_kept, logits, lowest - 1)
