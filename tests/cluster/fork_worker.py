"""Start a worker of Ray by forking a process that has imported what workers need, in place of Ray's `setup_worker.py`.

A worker of a test lives for seconds, before which it would import PyTorch, Transformers and others for ten. So the first
worker process of a raylet becomes its *fork server*: it imports them once, and forks itself for every worker, the first one
included. A fork runs Ray's `default_worker.py` with the arguments, environment variables, directory and standard streams
that the raylet gave it, and imports Ray and this project's modules itself. It shares with the other forks Python's hash seed
and the addresses of libraries, and it ends without the end of Python, always with status 0, once all exit functions have
been called. Workers that need another interpreter, path or directory are started as Ray does it. `ray_with_forks.py` starts
nodes that work like this.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

# Ray is not among them: when it is imported it reads which job the process belongs to, and draws an ID, and forks that share
# the state of its random number generator give different objects the same ID.
_MODULES = (
    "boto3",
    "deepspeed",
    "fsspec",
    "jsonschema",
    "matplotlib.figure",
    "mlflow",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "scipy.stats",
    "transformers.models.gpt2.modeling_gpt2",
    "tyro",
)
_STREAMS = (0, 1, 2)
_MAX_BYTES = 2**17  # of a request


def _request(arguments: list[str]) -> dict[str, Any] | None:
    """Return what a fork has to know to be the worker, or None if only a new process can be it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    options, rest = parser.parse_known_args(arguments)
    context = json.loads(options.serialized_runtime_env_context or "{}")
    variables = context.pop("env_vars", {})
    executable = context.pop("py_executable", None) or sys.executable
    is_worker = Path(rest[0]).name == "default_worker.py"  # and not one of Ray's servers
    is_of_python = any(name.startswith("PYTHON") for name in variables)  # what Python reads when it starts
    if not is_worker or is_of_python or executable != sys.executable or any(context.values()):
        return None
    return {"arguments": rest, "environment": dict(os.environ), "variables": variables, "directory": os.getcwd()}


def _send(address: str, request: dict[str, Any]) -> None:
    """Hand a request and this process's standard streams over to the fork server."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        while connection.connect_ex(address):  # the server has its address, but does not listen yet
            time.sleep(0.01)
        socket.send_fds(connection, [json.dumps(request).encode()], _STREAMS)


def _work(request: dict[str, Any], streams: list[int]) -> None:
    """Be a worker of Ray until it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # because the raylet sends the signals that end a worker to its whole process group
    for stream, number in zip(streams, _STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    importlib.import_module("ray._private.utils").update_envs(request["variables"])
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _leave() -> None:
    """End this process without the end of Python, which would visit, and so copy, all that a fork shares with the server."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _serve(listener: socket.socket, request: dict[str, Any]) -> None:
    """Fork a worker for a first request, and for every other one until the raylet ends."""
    atexit.register(_leave)  # The first is called last, after what the modules below and Ray do when Python ends.
    # A script's directory comes first on the path. In workers it is that of Ray's script, not that of the tests.
    sys.path[0] = str(Path(request["arguments"][0]).parent)
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the collections of a fork do not copy what it shares with the server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that have ended disappear
    streams = [os.dup(number) for number in _STREAMS]
    while True:
        if os.fork() == 0:
            listener.close()
            os.close(raylet)
            _work(request, streams)
            return
        for stream in streams:
            os.close(stream)
        ready, _, _ = select.select([listener, raylet], [], [])
        if raylet in ready:
            return
        connection, _ = listener.accept()
        with connection:
            text, streams, *_ = socket.recv_fds(connection, _MAX_BYTES, len(_STREAMS))
            request = json.loads(text)


def main(arguments: list[str]) -> None:
    """Have this raylet's fork server start a worker by the arguments of Ray's `setup_worker.py`, or become that server."""
    request = _request(arguments)
    if request is None:
        setup = Path(sysconfig.get_path("platlib"), "ray", "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(setup), *arguments])
    (raylet,) = (item.partition("=")[2] for item in arguments if item.startswith("--raylet-name="))
    address = f"{raylet}.forks"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError:  # Another worker of this raylet was first.
        listener.close()
        _send(address, request)
    else:
        listener.listen()
        _serve(listener, request)


if __name__ == "__main__":
    main(sys.argv[1:])
