"""Clients of compose_trial.py: streams by gRPC, and OpenAI's API over HTTP without an SDK."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from compose_containers import require, wait_for

from coppice import Client, FinishInfo, TokenDelta

_TIMEOUT_S = 300.0


class Stream:
    """A request in a thread; its tokens are checked to be gapless as they come."""

    def __init__(
        self, client: Client, prompt: str, num_tokens: int, *, round_times: bool = False
    ) -> None:
        self.token_ids: list[int] = []
        self.finish: FinishInfo | None = None
        self.longest_pause_s = 0.0
        self._error: Exception | None = None
        self._events = client.stream(prompt, max_new_tokens=num_tokens, round_times=round_times)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        heard = time.monotonic()
        try:
            for event in self._events:
                if isinstance(event, TokenDelta):
                    if event.token_offset != len(self.token_ids):
                        raise AssertionError("tokens were lost or repeated")
                    if self.token_ids:
                        pause_s = time.monotonic() - heard
                        self.longest_pause_s = max(self.longest_pause_s, pause_s)
                    heard = time.monotonic()
                    self.token_ids += event.token_ids
                elif isinstance(event, FinishInfo):
                    self.finish = event
        except Exception as error:
            self._error = error

    def reaches(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        wait_for(
            lambda: len(self.token_ids) >= num_tokens or not self._thread.is_alive(),
            _TIMEOUT_S,
            f"{num_tokens} tokens",
        )

    def result(self) -> FinishInfo:
        """Wait for the end of the request."""
        self._thread.join(_TIMEOUT_S)
        if self._error is not None:
            raise self._error
        require(self.finish is not None, f"stuck after {len(self.token_ids)} tokens")
        assert self.finish is not None
        return self.finish


def completion(prompt: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a greedy request of /v1/completions to the bundled model."""
    return {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **fields}


class Http:
    """The gateway at its published port.

    Args:
        url: Without the path.
        token: Of a client; empty: none is shown.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Send a request: GET, or POST of a body.

        Raises: urllib.error.HTTPError, which says what was answered.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, self._headers)
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.msg = error.read().decode(errors="replace")
            raise
        return answer

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer."""
        with self.open(path, body) as answer:
            return json.load(answer)

    def status(self, path: str) -> int:
        """Return the status of a GET; 0: nobody answers."""
        try:
            with self.open(path) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a completion, up to [DONE]; the connection may break before."""
        with self.open("/v1/completions", {**body, "stream": True}) as answer:
            for line in answer:
                data = line.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield json.loads(data)
        raise ConnectionError("the stream ended without [DONE]")


class HttpStream:
    """A streamed completion in a thread."""

    def __init__(self, gateway: Http, body: dict[str, Any]) -> None:
        self.token_ids: list[int] = []
        self.error: Exception | None = None
        self._events = gateway.stream({**body, "return_token_ids": True})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self._events:
                require("error" not in event, f"{event}")
                for choice in event["choices"]:
                    self.token_ids += choice.get("token_ids") or ()
        except Exception as error:
            self.error = error

    def reaches(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        wait_for(
            lambda: len(self.token_ids) >= num_tokens or not self._thread.is_alive(),
            _TIMEOUT_S,
            f"{num_tokens} tokens over HTTP",
        )

    def wait(self) -> None:
        """Wait for the end of the stream, in order or by an error."""
        self._thread.join(_TIMEOUT_S)
        require(not self._thread.is_alive(), f"stuck after {len(self.token_ids)} tokens over HTTP")
