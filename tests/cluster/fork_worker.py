"""Start a worker of Ray by forking a process that has imported what workers need, in place of Ray's `setup_worker.py`.

A worker of a test lives for seconds, before which it would import PyTorch, Transformers and others for ten. So the first
worker process of a raylet becomes its *fork server*: it imports them once, and forks itself for every worker, the first one
included. A fork is what Ray would have started otherwise: it runs Ray's `default_worker.py` with the arguments, environment
variables, directory and standard streams that the raylet gave it, and imports Ray and this project's modules itself. It
shares with the other forks Python's hash seed and the addresses of libraries, and it ends without the end of Python, always
with status 0, once all exit functions have been called. Workers that need another interpreter, path or
directory are started as Ray does it, and so are all workers of a Ray that a job starts by itself.

`ray_with_forks.py` starts nodes that work like this; benchmarks start theirs as a user does.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import time
from contextlib import suppress
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
    "pandas",
    "PIL.Image",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pydantic",
    "scipy.stats",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.gpt2.modeling_gpt2",
    "tyro",
)
_STREAMS = (0, 1, 2)
_NUM_WAITING = 128


def _option(arguments: list[str], name: str) -> str:
    """Return the value of `--name=value`, or an empty text."""
    prefix = f"--{name}="
    return next((item.removeprefix(prefix) for item in arguments if item.startswith(prefix)), "")


def _request(arguments: list[str]) -> dict[str, Any] | None:
    """Return what a fork has to know to be the worker, or None if only a new process can be it."""
    context = json.loads(_option(arguments, "serialized-runtime-env-context") or "{}")
    variables = context.pop("env_vars", {})
    executable = context.pop("py_executable", None) or sys.executable
    is_worker = Path(arguments[0]).name == "default_worker.py"  # and not one of Ray's servers
    is_of_python = any(name.startswith("PYTHON") for name in variables)  # what Python reads when it starts
    if not is_worker or is_of_python or executable != sys.executable or any(context.values()):
        return None
    of_setup = ("--serialized-runtime-env-context=", "--language=")
    return {
        "arguments": [item for item in arguments if not item.startswith(of_setup)],
        "environment": dict(os.environ),
        "variables": variables,
        "directory": os.getcwd(),
    }


def _send(address: str, request: dict[str, Any]) -> None:
    """Hand a request and this process's standard streams over to the fork server."""
    with socket.socket(socket.AF_UNIX) as connection:
        while True:
            try:
                connection.connect(address)
                break
            except ConnectionRefusedError:  # the server has its address, but does not listen yet
                time.sleep(0.01)
        connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", _STREAMS))])
        connection.sendall(json.dumps(request).encode())


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its standard streams."""
    streams = array.array("i")
    _, ancillary, *_ = connection.recvmsg(1, socket.CMSG_SPACE(len(_STREAMS) * streams.itemsize))
    streams.frombytes(ancillary[0][2])
    with connection.makefile("rb") as file:
        return json.loads(file.read()), list(streams)


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


def _reap(*_: object) -> None:
    """Let workers that have ended disappear."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


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
    signal.signal(signal.SIGCHLD, _reap)
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
            request, streams = _receive(connection)


def main(arguments: list[str]) -> None:
    """Have this raylet's fork server start a worker, or become that server.

    Args:
        arguments: those of Ray's `setup_worker.py`.
    """
    request = _request(arguments)
    if request is None:
        ray = importlib.util.find_spec("ray")
        assert ray is not None
        assert ray.origin is not None
        setup = Path(ray.origin).parent / "_private" / "workers" / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(setup), *arguments])
    address = f"{_option(arguments, 'raylet-name')}.forks"
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
    except OSError:  # Another worker of this raylet was first.
        listener.close()
        _send(address, request)
    else:
        listener.listen(_NUM_WAITING)
        _serve(listener, request)


if __name__ == "__main__":
    main(sys.argv[1:])
