"""Cut benchmark prompts from held-out files of the CPython standard library.

A prompt starts at a top-level statement and stops at a line end inside a file, without the
newline, so that the model goes on with the next line.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from pathlib import Path

from tokenizers import Tokenizer

from training.train_tokenizer import read_jsonl

logger = logging.getLogger(__name__)

STARTS = ("def ", "class ", "async def ", "@", "import ", "from ")
MIN_TOKENS, MAX_TOKENS, MIN_TOKENS_LEFT = 100, 250, 200


def cut_prompt(text: str, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """Return a random stretch of whole lines of the right length, or None."""
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith(STARTS)]
    rng.shuffle(starts)
    for start in starts[:8]:
        wanted = rng.randint(MIN_TOKENS + 20, MAX_TOKENS)
        end = start
        while end < len(lines):
            end += 1
            prompt = "\n".join(lines[start:end])
            num_tokens = len(tokenizer.encode(prompt).ids)
            if num_tokens >= wanted:
                break
        rest = "\n".join(lines[end:])
        fits = MIN_TOKENS <= num_tokens <= MAX_TOKENS and prompt.strip() == prompt
        if fits and len(tokenizer.encode(rest).ids) >= MIN_TOKENS_LEFT:
            return prompt
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("training/data"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/prompts/heldout.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-per-file", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = Tokenizer.from_file(str(args.data_dir / "tokenizer.json"))
    rng = random.Random(args.seed)
    files = [
        record
        for record in read_jsonl(args.data_dir / "heldout.jsonl")
        if record["source"].startswith("cpython-") and "test" not in record["path"].lower()
    ]
    rng.shuffle(files)
    prompts: dict[str, str] = {}  # text -> source
    for _ in range(args.max_per_file):
        for file in files:
            text = cut_prompt(file["text"], tokenizer, rng)
            if text and len(prompts) < args.num_prompts:
                prompts.setdefault(text, f"{file['source']}/{file['path']}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", encoding="utf-8") as out:
        for i, (text, source) in enumerate(prompts.items()):
            record = {"id": f"heldout-{i:03d}", "source": source, "text": text}
            out.write(json.dumps(record) + "\n")
    logger.info("%d prompts from %d held-out files", len(prompts), len(set(prompts.values())))


if __name__ == "__main__":
    main()
