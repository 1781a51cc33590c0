"""Serve the page and stream tokens to it, on the loopback interface only.

    GET /                the page
    GET /about           JSON: the name of the model, its τ_max and the maximum number of tokens
    GET /generate?…      server-sent events: `tokens` for every step, then `end`; or `refused` with a message

The standard library is enough for one person. A request that names another host is refused, so that no website can
read the model through a name that leads to this machine; and so is one that another site's page has made, which could not
read the answer, but would have the model compute. A connection that sends nothing is closed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from jobs.scoring.playground.config import PlaygroundConfig, Settings
from jobs.scoring.playground.streams import Playground

HOST = "127.0.0.1"
_PAGE = Path(__file__).with_name("page.html")
# The page loads nothing from anywhere: its styles and its script are in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def make_server(config: PlaygroundConfig, playground: Playground) -> ThreadingHTTPServer:
    """Return a server that is bound to its port and not started; `server_port` is the port.

    Raises:
        OSError: if the port is taken.
    """
    try:
        return ThreadingHTTPServer((HOST, config.port), partial(_Handler, config, playground))
    except OSError as error:
        raise type(error)(
            f"port = {config.port} cannot be used ({error.strerror}): give another --port, or end what listens there"
        ) from error


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of the page; see the docstring of this module."""

    # Seconds to wait for a request, or for the browser to take what it asked for. The base class reads this name.
    timeout = 10.0

    def __init__(self, config: PlaygroundConfig, playground: Playground, *arguments: Any) -> None:
        self.config, self.playground = config, playground
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer a request."""
        address = urlsplit(self.path)
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, f"this server answers to {HOST} and localhost only")
        elif self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):  # every browser says it
            self.send_error(HTTPStatus.FORBIDDEN, "this server answers to its own page only")
        elif address.path == "/":
            self._send("text/html; charset=utf-8", _PAGE.read_bytes())
        elif address.path == "/about":
            about = {
                "model": self.config.model,
                "tau_max": self.playground.temperatures.tau_max,
                "max_new_tokens": self.config.max_new_tokens,
            }
            self._send("application/json", json.dumps(about).encode())
        elif address.path == "/generate":
            self._stream(dict(parse_qsl(address.query, keep_blank_values=True)))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, query: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        # The connection breaks when the page is closed or its reader presses Stop.
        with (
            contextlib.suppress(BrokenPipeError, ConnectionResetError),
            contextlib.closing(self._events(query)) as events,
        ):
            for event, data in events:
                self.wfile.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())
                self.wfile.flush()

    def _events(self, query: dict[str, str]) -> Generator[tuple[str, Any]]:
        try:
            settings = Settings.parse(query, max_new_tokens=self.config.max_new_tokens)
            steps = self.playground.generate(settings)
        except ValueError as error:
            yield "refused", str(error)
            return
        for tokens in steps:
            yield "tokens", {name: asdict(token) for name, token in tokens.items()}
        yield "end", {}

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the requests hold what a person has typed."""
