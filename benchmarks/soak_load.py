"""Requests of many kinds that arrive at random; each output is compared with its plain one."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coppice import Client, Completion, FinishInfo, TokenDelta

NUM_CLIENTS = 4
MAX_AT_ONCE = 40
# A client that resumes tries again every 2 s at most.
MAX_RETRIES = 200
CANCELLED_SHARE = 0.12
SLOW_SHARE = 0.12
MAX_PAUSE_S = 4.0
MODES: list[bool | None] = [None, None, True, True, False]
"""AUTO, AUTO, ON, ON, OFF: on a CPU AUTO has trees only while one or two requests run."""
_LONG = "".join(f"def step_{i}(value):\n    return value + {i}\n\n" for i in range(70))
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "def read_config(path):\n", "max_new_tokens": 80, "ignore_eos": True},
    "short": {"prompt": "x = ", "max_new_tokens": 3, "ignore_eos": True},
    "token ids": {"token_ids": [11, 300, 45, 12], "max_new_tokens": 30, "ignore_eos": True},
    "seeded": {"prompt": "import asyncio\n" * 20, "max_new_tokens": 60, "temperature": 0.7},
    "filters": {
        "prompt": "class Queue:\n",
        "max_new_tokens": 60,
        "ignore_eos": True,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.02,
    },
    "penalties": {
        "prompt": "def parse(line):\n",
        "max_new_tokens": 60,
        "ignore_eos": True,
        "temperature": 0.8,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "logit bias": {"prompt": "for i in", "max_new_tokens": 30, "logit_bias": {5: 2.0, 9: -100.0}},
    "logprobs": {
        "prompt": "class Node:\n",
        "max_new_tokens": 40,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 3,
    },
    "stop strings": {
        "prompt": "for i in range(",
        "max_new_tokens": 80,
        "stop_strings": ["\n\n", "return"],
    },
    "text and stop": {
        "prompt": "def fibonacci(n):\n",
        "max_new_tokens": 80,
        "stop_strings": ["\n"],
        "include_stop_in_output": True,
        "min_new_tokens": 5,
    },
    "no text": {
        "prompt": "def add(a, b):\n",
        "max_new_tokens": 50,
        "ignore_eos": True,
        "omit_text": True,
    },
    "large tree": {
        "prompt": "def merge(left, right):\n",
        "max_new_tokens": 90,
        "ignore_eos": True,
        "num_steps": 6,
        "topk": 4,
        "num_draft_tokens": 32,
    },
    "urgent": {"prompt": "while True:\n", "max_new_tokens": 24, "ignore_eos": True, "priority": 1},
    "long prompt": {"prompt": _LONG, "max_new_tokens": 40, "ignore_eos": True},
    "long prompt, seeded": {
        "prompt": _LONG[: len(_LONG) // 3],
        "max_new_tokens": 40,
        "ignore_eos": True,
        "temperature": 0.9,
    },
    "long output": {"prompt": "class Parser:\n", "max_new_tokens": 300, "ignore_eos": True},
}
for _index, _request in enumerate(REQUESTS.values()):
    if "temperature" in _request:
        _request["seed"] = 100 + _index


class Load:
    """Poisson arrivals of requests over a few connections, from threads of this process.

    Args:
        address: HOST:PORT that clients connect to.
        plain: Of each of REQUESTS, in order, what it gives without speculation.
        rate: Requests per second.
    """

    def __init__(
        self, address: str, plain: Sequence[Completion], rate: float, rng: random.Random
    ) -> None:
        self._plain = dict(zip(REQUESTS, plain, strict=True))
        self._rate = rate
        self._rng = rng
        self._clients = [Client(address, max_retries=MAX_RETRIES) for _ in range(NUM_CLIENTS)]
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE)
        self._free = threading.Semaphore(MAX_AT_ONCE)
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        """Requests by kind and by how they were read; tokens received."""
        self.failures: list[str] = []
        """Outputs that differ, and requests that ended with an error."""
        self._arrivals = threading.Thread(target=self._arrive, daemon=True)
        self._arrivals.start()

    def finish(self, timeout_s: float) -> None:
        """Let no request come any more, and wait for those that are here."""
        self._is_over.set()
        self._arrivals.join()
        deadline = time.monotonic() + timeout_s
        for _ in range(MAX_AT_ONCE):
            if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self.failures.append("requests are stuck")
                break
        for client in self._clients:
            client.close()
        self._threads.shutdown()

    def _arrive(self) -> None:
        while not self._is_over.wait(self._rng.expovariate(self._rate)):
            if not self._free.acquire(blocking=False):
                self.counts["not sent, for too many ran"] += 1
                continue
            kind = self._rng.choice(list(REQUESTS))
            seed = self._rng.randrange(1 << 30)
            self._threads.submit(self._run, kind, random.Random(seed))

    def _run(self, kind: str, rng: random.Random) -> None:
        try:
            reading, num_tokens = self._read(kind, rng)
            with self._lock:
                self.counts.update({kind: 1, reading: 1, "tokens": num_tokens})
        except Exception as error:
            self.failures.append(f"{time.strftime('%H:%M:%S')} {kind}: {error!r}"[:2000])
        finally:
            self._free.release()

    def _read(self, kind: str, rng: random.Random) -> tuple[str, int]:
        """Send a request and check what comes. Returns: how it was read, and tokens received."""
        plain = self._plain[kind]
        wanted = len(plain.token_ids)
        chance = rng.random()
        if chance < CANCELLED_SHARE:
            reading, wanted = "cancelled", rng.randrange(wanted)
        else:
            reading = "read slowly" if chance < CANCELLED_SHARE + SLOW_SHARE else "read"
        output = _Output()
        options = {**REQUESTS[kind], "speculation": rng.choice(MODES)}
        stream = rng.choice(self._clients).stream(**options)
        for event in stream:
            output.take(event)
            if reading == "cancelled" and len(output.token_ids) > wanted:
                break
            if reading == "read slowly":  # until no request comes any more
                self._is_over.wait(rng.choice([0.0, 0.01, 0.1, rng.uniform(0.0, MAX_PAUSE_S)]))
        stream.close()
        output.check(plain)
        return reading, len(output.token_ids)


class _Output:
    """What a request has given so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[Any] = []
        self._text = ""
        self._finish: FinishInfo | None = None

    def take(self, event: object) -> None:
        """Add an event."""
        if isinstance(event, TokenDelta):
            assert event.token_offset == len(self.token_ids), "tokens were lost or repeated"
            self.token_ids += event.token_ids
            self._logprobs += event.logprobs
            self._text += event.text
        elif isinstance(event, FinishInfo):
            self._finish = event

    def check(self, plain: Completion) -> None:
        """Compare with the plain output, as far as it was read."""
        num_tokens = len(self.token_ids)
        assert self.token_ids == list(plain.token_ids)[:num_tokens], "other tokens"
        assert self._logprobs == list(plain.logprobs)[:num_tokens], "other logprobs"
        if self._finish is None:
            assert plain.text.startswith(self._text), "another text"
            return
        assert num_tokens == len(plain.token_ids), "it ended early"
        assert self._text == plain.text, "another text"
        ends = (self._finish.reason, self._finish.matched_stop, self._finish.usage)
        assert ends == (plain.finish_reason, plain.matched_stop, plain.usage), "another end"
