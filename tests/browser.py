"""A real browser without a window, driven by the Chrome DevTools protocol over a pipe."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    # Whoever runs tests in a container is often root there, which has no sandbox of Chromium's.
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"),
)
_MAX_MESSAGE_BYTES = 64 << 20
_KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Home": 36}
_CTRL = 2


def find_browser() -> str | None:
    """Return the browser of this machine: CHROMIUM, or the first that PATH has."""
    names = (os.environ.get("CHROMIUM", ""), *_NAMES)
    return next(filter(None, map(shutil.which, filter(None, names))), None)


class Page:
    """One tab.

    Args:
        session: Its name in the protocol.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def show(self, *, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Change the size of the window and whether it is dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def go(self, url: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript, which must be JSON."""
        said = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until JavaScript is truthy; return its value."""
        async with asyncio.timeout(120):
            while not (value := await self.evaluate(expression)):
                await asyncio.sleep(0.01)
        return value

    async def press(self, key: str, *, ctrl: bool = False) -> None:
        """Press a key where the focus is."""
        code: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        if key == "Enter":
            code["text"] = "\r"
        modifiers = _CTRL if ctrl else 0
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **code)

    async def type(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        said = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(said["data"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol for this tab."""
        return await self._browser.call(method, session=self._session, **params)

    @property
    def problems(self) -> list[str]:
        """Return what scripts of this tab have thrown, and what it logged as an error."""
        return self._browser.problems.get(self._session, [])


class Browser:
    """A running browser."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self._reader = reader
        self._write_fd = write_fd
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: dict[str, list[str]] = {}

    async def open(self) -> Page:
        """Open a tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        return page

    async def call(self, method: str, *, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(120):
            return await answer

    async def listen(self) -> None:
        """Take answers and events until the browser has ended."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                self._take(json.loads((await self._reader.readuntil(b"\0"))[:-1]))

    def _take(self, message: dict[str, Any]) -> None:
        found = self.problems.setdefault(message.get("sessionId", ""), [])
        match message:
            case {"id": number, "result": result}:
                self._calls.pop(number).set_result(result)
            case {"id": number, "error": error}:
                self._calls.pop(number).set_exception(RuntimeError(str(error)))
            case {"method": "Runtime.exceptionThrown", "params": params}:
                found.append(str(params["exceptionDetails"]))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as entry}}:
                found.append(f"{entry['text']} {entry.get('url', '')}")


@contextlib.asynccontextmanager
async def browsing(program: str) -> AsyncIterator[Browser]:
    """Run a browser for the length of a block."""
    (commands, write_fd), (read_fd, answers) = map(_far_pipe, range(2))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        flags = (*_FLAGS, f"--user-data-dir={directory}")
        pid = os.posix_spawn(
            program,
            [program, *flags],
            {**os.environ, "HOME": directory},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, commands, 3),
                (os.POSIX_SPAWN_DUP2, answers, 4),
            ],
            setpgroup=0,
        )
        os.close(commands)
        os.close(answers)
        reader = asyncio.StreamReader(limit=_MAX_MESSAGE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb")
        )
        browser = Browser(reader, write_fd)
        listening = asyncio.create_task(browser.listen())
        try:
            yield browser
        finally:
            os.killpg(pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, pid, 0)
            await listening
            transport.close()
            os.close(write_fd)


def _far_pipe(_: int) -> tuple[int, int]:
    """Return a pipe whose ends are no descriptors that the browser expects something at."""
    found = []
    for end in os.pipe():
        found.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return found[0], found[1]
