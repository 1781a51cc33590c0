"""A page in headless Chromium, by the Chrome DevTools Protocol: run JavaScript in it, and see what it asks for."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page of the browser, and the addresses that it has asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requested: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("method") == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    async def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait_for(self, script: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not await self.run(script):
            assert time.monotonic() < deadline, script
            await asyncio.sleep(0.1)

    async def hover(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that a CSS selector matches."""
        box = await self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", **middle)

    async def screenshot(self, path: Path) -> None:
        """Write a picture of what can be seen."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@contextlib.asynccontextmanager
async def open_page(url: str, profile: Path) -> AsyncIterator[Page]:
    """Start a browser with an empty profile, and open a page."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}",
        "--window-size=1000,700", *(["--no-sandbox"] if os.getuid() == 0 else []), "about:blank",
    ]  # fmt: skip
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        note, deadline = profile / "DevToolsActivePort", time.monotonic() + 60
        while not note.is_file() or "\n" not in note.read_text():
            assert browser.poll() is None, "the browser has ended"
            assert time.monotonic() < deadline, "the browser does not start"
            await asyncio.sleep(0.1)
        port = note.read_text().splitlines()[0]
        async with (
            aiohttp.ClientSession() as session,
            session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer,
            session.ws_connect((await answer.json())["webSocketDebuggerUrl"], max_msg_size=0) as socket,
        ):
            page = Page(socket)
            await page.call("Network.enable")
            await page.call("Page.enable")
            await page.call("Page.navigate", url=url)
            yield page
    finally:
        browser.terminate()
        browser.wait(timeout=60)
