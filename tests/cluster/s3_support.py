"""Provide an S3 server on loopback to tests and benchmarks: moto, which is slow, fails and counts as it is told.

It runs in a process of its own (`run_object_store`), so that it takes no computing time from the one that reads, and imports
nothing of the project, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyarrow import fs
from server_support import free_port, run_server

CONTROL = "/.control"
CHUNK_BYTES = 2**18
# moto accepts any keys, and keeps the objects of all of them together. With these variables the library of AWS looks for
# keys neither in files nor at a server of its own.
_KEY, _REGION = "testing", "us-east-1"
_KEYS = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _KEY, "AWS_DEFAULT_REGION": _REGION}


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What the server does to requests."""

    latency: float = 0.0
    """Seconds before every answer."""
    bytes_per_second: float = 0.0
    """Bandwidth of all answers together; 0: unlimited."""
    share_failing: float = 0.0
    """Share of the requests for data (GET of an object) that fail, in turn with 503, with a connection that is reset
    before the answer, and with one that is reset in its middle."""
    seed: int = 0
    gone: str = ""
    """Requests for paths that contain this are answered with 404 NoSuchKey."""
    remembers: bool = False
    """Whether answers to requests for data are kept, so that moto takes no time from a benchmark; nothing may be written."""
    refuses_writes: bool = False
    """Whether everything but reading is answered with 403 AccessDenied, as a bucket that is read-only does."""
    needs_keys: bool = False
    """Whether requests without a signature are answered with 403 AccessDenied, as a bucket that is not public does."""


@dataclass(kw_only=True)
class Counts:
    """What the server has seen since it was last asked to count anew."""

    num_gets: int = 0
    """Answered requests for data, which are GETs of objects."""
    num_bytes: int = 0
    """Bytes of the answers to these."""
    num_failed: int = 0
    """Requests that failed because they were told to."""
    reads: dict[str, int] = field(default_factory=dict)
    """Number of answered requests by path."""


class Server(ThreadingHTTPServer):
    """Answers requests with what moto answers, as `Behaviour` says."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.test import Client

        super().__init__(("127.0.0.1", port), Handler)
        self.moto = Client(DomainDispatcherApplication(create_backend_app), use_cookies=False)
        self.behaviour, self.counts, self.rng = Behaviour(), Counts(), random.Random(0)
        self.memory: dict[tuple[str, str], tuple[int, dict[str, str], bytes]] = {}
        self.lock, self.free_at = threading.Lock(), 0.0

    def control(self, values: dict[str, Any]) -> dict[str, Any]:
        """Change the behaviour, if values are given, and return the counts; changing begins to count anew."""
        with self.lock:
            counts = asdict(self.counts)
            if values:
                self.behaviour, self.counts = Behaviour(**values), Counts()
                self.rng = random.Random(self.behaviour.seed)
            return counts

    def wait_for_bandwidth(self, num_bytes: int) -> None:
        """Wait until so many more bytes fit through the line, which all answers share."""
        if self.behaviour.bytes_per_second:
            with self.lock:
                self.free_at = max(self.free_at, time.monotonic()) + num_bytes / self.behaviour.bytes_per_second
                wait = self.free_at - time.monotonic()
            time.sleep(max(0.0, wait))


class Handler(BaseHTTPRequestHandler):
    """One connection to the server."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        body = self.body()
        if self.path == CONTROL:
            self.send_whole(200, json.dumps(self.server.control(json.loads(body))).encode())
            return
        behaviour = self.server.behaviour
        time.sleep(behaviour.latency)
        is_data = self.command == "GET" and "list-type" not in self.path and self.path.count("/") > 1
        is_write, failure = self.command not in ("GET", "HEAD"), ""
        with self.server.lock:
            if is_data and self.server.rng.random() < behaviour.share_failing:
                failure = ("503", "reset", "cut")[self.server.counts.num_failed % 3]
                self.server.counts.num_failed += 1
        if behaviour.gone and behaviour.gone in self.path:
            self.refuse(404, "NoSuchKey")
        elif (behaviour.refuses_writes and is_write) or (behaviour.needs_keys and "Authorization" not in self.headers):
            self.refuse(403, "AccessDenied")
        elif failure == "503":
            self.refuse(503, "SlowDown")
        elif failure == "reset":
            self.reset()
        else:
            self.pass_on(body, is_data=is_data, is_cut=failure == "cut")

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        del self.headers["Transfer-Encoding"]
        return b"".join(parts)

    def pass_on(self, body: bytes, *, is_data: bool, is_cut: bool) -> None:
        key = (self.path, self.headers.get("Range", ""))
        remembers = is_data and self.server.behaviour.remembers
        answer = (remembers and self.server.memory.get(key)) or self.ask(body)
        if remembers:
            self.server.memory[key] = answer
        status, headers, content = answer
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if is_cut:
            self.wfile.write(content[: len(content) // 2])
            self.reset()
            return
        if is_data and status in (200, 206):
            with self.server.lock:
                counts, path = self.server.counts, self.path.split("?")[0]
                counts.num_gets += 1
                counts.num_bytes += len(content)
                counts.reads[path] = counts.reads.get(path, 0) + 1
        view = memoryview(content)
        for at in range(0, len(view), CHUNK_BYTES):
            part = view[at : at + CHUNK_BYTES]
            self.server.wait_for_bandwidth(len(part))
            self.wfile.write(part)

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the content of moto's answer."""
        url, headers = f"http://{self.headers['Host']}", list(self.headers.items())
        answer = self.server.moto.open(self.path, url, method=self.command, headers=headers, data=body)
        answer.headers.remove("Connection")
        if self.command == "HEAD" or answer.status_code == 204:
            return answer.status_code, dict(answer.headers), b""
        answer.headers["Content-Length"] = str(len(answer.get_data()))
        return answer.status_code, dict(answer.headers), answer.get_data()

    def refuse(self, status: int, code: str) -> None:
        self.send_whole(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message/></Error>".encode())

    def send_whole(self, status: int, content: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        self.rfile = self.wfile = open(os.devnull, "rb+")  # noqa: SIM115 — closed with the connection


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """A server that runs, and what its clients need."""

    port: int

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which clients find the server."""
        return _KEYS | {"AWS_ENDPOINT_URL": self.endpoint}

    @property
    def filesystem(self) -> fs.S3FileSystem:
        """The server's filesystem, whatever the environment is."""
        keys = {"access_key": _KEY, "secret_key": _KEY, "region": _REGION}
        place = {"scheme": "http", "endpoint_override": f"127.0.0.1:{self.port}"}
        return fs.S3FileSystem(**keys, **place, allow_bucket_creation=True)

    def create_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.filesystem.create_dir(name)
        return name

    def upload(self, directory: Path, to: str) -> None:
        """Copy the files of a local directory to `bucket/prefix`."""
        fs.copy_files(str(directory), to, destination_filesystem=self.filesystem)

    def behave(self, **values: Any) -> None:
        """Change the behaviour (`Behaviour`) and begin to count anew."""
        self._control(asdict(Behaviour(**values)))

    def counts(self) -> Counts:
        """Return what was counted since the last change of behaviour."""
        return Counts(**self._control({}))

    def num_reads(self, path: str) -> int:
        """Return how often the content of `bucket/key` was asked for since the last change of behaviour."""
        return self.counts().reads.get(f"/{path}", 0)

    def _control(self, values: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.endpoint}{CONTROL}", json.dumps(values).encode(), method="POST")
        with urllib.request.urlopen(request) as reply:
            content: dict[str, Any] = json.loads(reply.read())
            return content


@contextmanager
def run_object_store(log: Path) -> Iterator[ObjectStore]:
    """Run a server with a bucket `bucket`, and yield it; the environment of this process stays as it is."""
    store = ObjectStore(port=free_port())
    with run_server([__file__, str(store.port)], store.port, log, environment=_KEYS):
        store.filesystem.create_dir("bucket")
        yield store


if __name__ == "__main__":
    Server(int(sys.argv[1])).serve_forever()
