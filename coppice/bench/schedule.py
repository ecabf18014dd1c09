"""Who arrives when: all at once, at random, or as a file says."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coppice.request import build_request
from shared.config.loader import suggestion
from shared.errors import ConfigError

_KEYS = ("at_s", "token_ids", "max_new_tokens", "temperature")

Prompt = str | tuple[int, ...]
"""Text, or token ids."""

# A prompt ends where a token may begin: before a line break, not after it.
DEFAULT_PROMPTS: tuple[Prompt, ...] = (
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self):",
    "import os\nimport sys\n\n\ndef main():",
    "def read_lines(path):\n    with open(path) as stream:",
    "class Node:\n    def __init__(self, value, left=None, right=None):",
    "def test_addition():\n    assert",
    "for index, name in enumerate(names):",
    "import json\n\n\ndef load_json(filename):",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a run.

    Args:
        at_s: When to send it, seconds from the beginning of the run.
        seed: Of its sampling.
        temperature: Its own; None: that of the run.
    """

    at_s: float
    prompt: Prompt
    max_new_tokens: int
    seed: int
    temperature: float | None = None

    def request(self, keywords: Mapping[str, Any]) -> bytes:
        """Return its GenerateRequest, serialized.

        Args:
            keywords: Of `RequestOptions`, the same for all arrivals.
        """
        options: Any = {**keywords, "max_new_tokens": self.max_new_tokens, "seed": self.seed}
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if isinstance(self.prompt, str):
            message = build_request(self.prompt, options)
        else:
            message = build_request(None, {**options, "token_ids": self.prompt})
        return message.SerializeToString()


def at_once(
    prompts: Sequence[Prompt], count: int, *, max_new_tokens: int, seed: int
) -> list[Arrival]:
    """Return so many arrivals at the same time, of the prompts in turn."""
    return [
        Arrival(
            at_s=0.0,
            prompt=prompts[index % len(prompts)],
            max_new_tokens=max_new_tokens,
            seed=seed + index,
        )
        for index in range(count)
    ]


def poisson(
    prompts: Sequence[Prompt], *, rate: float, seconds: float, max_new_tokens: int, seed: int
) -> list[Arrival]:
    """Return arrivals at random and independent times, of the prompts in turn.

    Args:
        rate: Mean arrivals per second.
        seed: Of the times, and of the first arrival's sampling.
    """
    times: list[float] = []
    chance = random.Random(seed)
    at_s = chance.expovariate(rate)
    while at_s <= seconds:
        times.append(at_s)
        at_s += chance.expovariate(rate)
    arrivals = at_once(prompts, len(times), max_new_tokens=max_new_tokens, seed=seed)
    return [replace(arrival, at_s=at_s) for arrival, at_s in zip(arrivals, times, strict=True)]


def read_schedule(path: str, *, seed: int) -> list[Arrival]:
    """Read a JSON list of {"at_s", "token_ids", "max_new_tokens"}, perhaps with "temperature".

    Args:
        seed: Of the first arrival's sampling.
    Raises: ConfigError that names the option and the entry.
    """
    rows = _read_json("--schedule", path)
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"--schedule {path} is no JSON list of arrivals")
    arrivals = []
    for index, row in enumerate(rows):
        if problem := _problem_of(row):
            raise ConfigError(f"--schedule {path}: entry {index} {problem}")
        arrival = Arrival(
            at_s=float(row["at_s"]),
            prompt=tuple(row["token_ids"]),
            max_new_tokens=row["max_new_tokens"],
            seed=seed + index,
            temperature=float(row["temperature"]) if "temperature" in row else None,
        )
        arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def read_prompts(path: str) -> list[Prompt]:
    """Read a JSON list of texts or of lists of token ids; else a prompt per line.

    A line that is a JSON string may hold newlines.

    Raises: ConfigError that names the option.
    """
    text = _read_text("--prompts", path)
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        values = None
    if isinstance(values, list):
        prompts = [_check_prompt(path, index, value) for index, value in enumerate(values)]
    else:
        prompts = [_parse_line(line) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path} holds no prompt")
    return prompts


def _problem_of(row: Any) -> str:
    """Return what is wrong with an entry of a schedule; empty: nothing."""
    if not isinstance(row, dict):
        return 'is no object with "at_s", "token_ids" and "max_new_tokens"'
    unknown = next((key for key in row if key not in _KEYS), None)
    if unknown is not None:
        return f"has {json.dumps(unknown)}, which means nothing{suggestion(unknown, _KEYS)}"
    at_s, length = row.get("at_s"), row.get("max_new_tokens")
    if not isinstance(at_s, int | float) or not 0 <= at_s < float("inf"):
        return f'has "at_s" {at_s!r}, expected seconds from the beginning on'
    if not _is_token_ids(row.get("token_ids")):
        return 'has no "token_ids", expected a list of whole numbers'
    if not isinstance(length, int) or length < 1:
        return f'has "max_new_tokens" {length!r}, expected at least 1'
    temperature = row.get("temperature", 0.0)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 <= temperature < float("inf"):
        return f'has "temperature" {temperature!r}, expected 0 or more'
    return ""


def _check_prompt(path: str, index: int, value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if _is_token_ids(value):
        return tuple(value)
    raise ConfigError(f"--prompts {path}: entry {index} is neither a text nor a list of token ids")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, int) for each in value)


def _parse_line(line: str) -> str:
    if line.startswith('"'):
        try:
            return str(json.loads(line))
        except json.JSONDecodeError:
            return line
    return line


def _read_json(option: str, path: str) -> Any:
    text = _read_text(option, path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} {path} is no JSON: {error}") from error


def _read_text(option: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(f"cannot read {option} {path}: {reason}") from error
