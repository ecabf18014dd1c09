"""Stream a completion with the Python client, and show what speculation did.

python examples/client.py [HOST:PORT]      needs a server: coppice up
"""

# ruff: noqa: T201
from __future__ import annotations

import sys

from coppice import Client, CoppiceError, FinishInfo, PromptInfo, TokenDelta

PROMPT = "def fibonacci(n):"


def main(address: str) -> int:
    """Stream one sampled completion, then ask for the same one whole, without speculation."""
    with Client(address) as client:
        seed = 0
        token_ids: list[int] = []
        for event in client.stream(PROMPT, max_new_tokens=48, temperature=0.7, seed=7):
            match event:
                case PromptInfo():
                    seed = event.seed  # the server's choice, had we sent none
                    print(
                        f"{event.model}: {event.num_prompt_tokens} prompt tokens\n{PROMPT}", end=""
                    )
                case TokenDelta():
                    token_ids += event.token_ids
                    print(event.text, end="", flush=True)
                case FinishInfo():
                    rounds = event.speculation
                    print(
                        f"\n{len(token_ids)} tokens in {rounds.num_rounds} rounds, "
                        f"{rounds.accept_length:.2f} tokens per round"
                    )
        plain = client.generate(
            PROMPT, max_new_tokens=48, temperature=0.7, seed=seed, speculation=False
        )
        is_same = plain.token_ids == tuple(token_ids)
        print(f"the same without speculation, in {plain.speculation.num_rounds} rounds: {is_same}")
        return 0 if is_same else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051"))
    except CoppiceError as error:
        sys.exit(f"{error.code.name} {error.reason}: {error.message}")
