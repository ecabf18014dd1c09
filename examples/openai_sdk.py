"""An app written for OpenAI's SDK; the only line that is about Coppice is its base_url.

python examples/openai_sdk.py [URL]      needs a server: coppice up, and: pip install openai
"""

# ruff: noqa: T201
from __future__ import annotations

import sys

from openai import OpenAI, OpenAIError


def main(base_url: str) -> int:
    """Stream a chat, then ask for two completions with the log-probabilities of their tokens."""
    client = OpenAI(base_url=base_url, api_key="none")  # a token, if the server asks for one
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "def fibonacci(n):"}],
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")
    completions = client.completions.create(
        model=model, prompt="class Stack:", max_tokens=16, n=2, seed=7, logprobs=1
    )
    for choice in completions.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        total = sum(logprob or 0.0 for logprob in choice.logprobs.token_logprobs)
        print(f"{choice.index}: {choice.text!r}, log-probability {total:.2f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"))
    except OpenAIError as error:
        sys.exit(f"{type(error).__name__}: {error}")
