"""Train the byte-level BPE tokenizer and encode both splits of the corpus.

Reads `train.jsonl` and `heldout.jsonl`, writes `tokenizer.json` and one flat uint16 file of token
ids per split: files in shuffled order, each followed by `<|endoftext|>` (id 0).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"


def read_jsonl(path: Path) -> list[dict]:
    """Read one JSON object per line."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def train_tokenizer(texts: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose id 0 is `<|endoftext|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample_texts(texts: list[str], *, max_bytes: int, seed: int) -> Iterator[str]:
    """Yield texts in random order until `max_bytes` characters were seen."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    total = 0
    for i in order:
        total += len(texts[i])
        if total > max_bytes:
            return
        yield texts[i]


def encode(tokenizer: Tokenizer, texts: list[str], *, seed: int) -> np.ndarray:
    """Encode the texts in shuffled order into one stream, each followed by id 0."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    chunks: list[np.ndarray] = []
    for start in range(0, len(order), 1024):
        batch = tokenizer.encode_batch_fast([texts[i] for i in order[start : start + 1024]])
        chunks.extend(np.array([*encoding.ids, 0], dtype=np.uint16) for encoding in batch)
    return np.concatenate(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("training/data"))
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--tokenizer", type=Path, help="encode with this one, train none")
    parser.add_argument("--max-training-bytes", type=int, default=60_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    splits = {name: read_jsonl(args.data_dir / f"{name}.jsonl") for name in ("train", "heldout")}
    train_texts = [record["text"] for record in splits["train"]]
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        sample = sample_texts(train_texts, max_bytes=args.max_training_bytes, seed=args.seed)
        tokenizer = train_tokenizer(sample, vocab_size=args.vocab_size)
    tokenizer.save(str(args.data_dir / "tokenizer.json"))
    cpython = [r for r in splits["heldout"] if r["source"].startswith("cpython-")]
    for name, records in (*splits.items(), ("heldout_cpython", cpython)):
        texts = [record["text"] for record in records]
        ids = encode(tokenizer, texts, seed=args.seed)
        ids.tofile(args.data_dir / f"{name}.bin")
        num_bytes = sum(len(text.encode()) for text in texts)
        logger.info("%s: %d tokens, %.3f bytes per token", name, len(ids), num_bytes / len(ids))


if __name__ == "__main__":
    main()
