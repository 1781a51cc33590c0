"""The two processes of the verifier unit-tests: one runs generated code, the other its tests, each confined for itself.

    python -I -B code_process.py code|tests|probe LIMITS [SOCKET]        limits as JSON, a descriptor; source on stdin

The code cannot pass by anything but what its functions answer: the process that knows the tests, and whose status says
whether they passed, never runs a line of it. The tests reach the code's names through a pair of sockets with lines of JSON.

* Plain values (None, bool, numbers, str, bytes, list, tuple, dict, set, range, and classes that Python has built in) are
  copied; lists, dictionaries and sets that a call changes are changed in the tests, too.
* Everything else stays where it is, and is a `Reference` in the tests: calls, attributes and operators go to the code. It
  is never equal to a plain value, whatever its class says.
* Functions of the tests can be called by the code. Exceptions arrive as the built-in class that they derive from;
  exception classes of the code can be caught by their name. Modules of the standard library that the code has imported
  are the tests' own; names that Python has built in cannot be replaced by the code.

Only the standard library is used, because nothing of this project can be read in here.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import operator
import os
import resource
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, TypeGuard

# mount(2), mount_setattr(2) and prctl(2)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC = 2, 4, 4096, 16384
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 442, -100, 0x8000, 1, 2
_PR_SET_NO_NEW_PRIVS, _CAPABILITY_VERSION_3 = 38, 0x20080522
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
PLACE = "/tmp"
"""The working directory of a process with a root of its own."""
_NUM_FILES = 4096


def build_root(root: str, readable: Iterable[str], num_bytes: int) -> None:
    """Make a directory the root of this process: a small file system in memory with a few places that are only read.

    There is no /proc and no socket in it. The process must be root in user and mount namespaces of its own, and gives up
    all its capabilities here.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def succeed(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    options = f"size={num_bytes},nr_inodes={_NUM_FILES},mode=755".encode()
    succeed(libc.mount(b"tmpfs", root.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options))
    for path in readable:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and os.path.dirname(path) == "/":  # such as /bin, a link to usr/bin
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "x").close()
        succeed(libc.mount(path.encode(), target.encode(), None, _MS_BIND | _MS_REC, None))
        if path not in _DEVICES:
            attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
            arguments = (_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, 32)
            succeed(libc.syscall(*arguments))
    os.makedirs(root + PLACE, exist_ok=True)
    os.chroot(root)
    os.chdir(PLACE)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    succeed(libc.capset(header, none))
    succeed(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def confine(limits: dict[str, Any]) -> None:
    """Take away what this process does not need: files, if `root` is given, and what is above its limits."""
    if limits["root"]:
        places = [*limits["readable"], *_DEVICES]
        build_root(limits["root"], [path for path in places if os.path.exists(path)], limits["file_bytes"])
        _limit(resource.RLIMIT_NPROC, limits["num_processes"])
    _limit(resource.RLIMIT_CPU, int(limits["seconds"]) + 1)
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


class Peer:
    """One end of the connection: encodes values, asks the other process, and answers what it asks in the meantime."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, verbs: dict[str, Callable[..., Any]]) -> None:
        self._reader, self._writer, self._verbs = reader, writer, verbs
        self._own: list[Any] = []  # objects that the other process knows by their numbers, which keeps their ids theirs
        self._numbers: dict[int, int] = {}
        self._known: dict[int, Any] = {}  # what stands for the other's objects
        self.stand_in: Callable[[int, Any], Any] = lambda number, description: None
        """Makes what stands for an object of the other process."""

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Have the other process do something, and return the result or raise its exception."""
        self._send({"ask": verb, "arguments": [self.encode(value) for value in arguments]})
        while True:
            message = self._receive()
            if "ask" in message:
                self._answer(message)
            elif "raised" in message:
                raise self._exception(message["raised"])
            else:
                for value, new in zip(arguments[-1] if verb == "call" else (), message["after"], strict=False):
                    _overwrite(value, self.decode(new))
                return self.decode(message["value"])

    def serve(self) -> None:
        while True:
            self._answer(self._receive())

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            arguments = [self.decode(value) for value in message["arguments"]]
            value = self._verbs[message["ask"]](*arguments)
            changeable = arguments[-1] if message["ask"] == "call" else ()
            after = [self.encode(item) if type(item) in _CHANGEABLE else None for item in changeable]
            answer = {"value": self.encode(value), "after": after}
        except BaseException as error:
            answer = {"raised": self._describe(error)}
        self._send(answer)

    def _describe(self, error: BaseException) -> dict[str, Any]:
        base = next(filter(_is_built_in, type(error).__mro__))
        plain = [value if type(value) in _PLAIN else str(value) for value in error.args]
        own = None if type(error) is base else self.encode(type(error))
        return {"base": base.__name__, "arguments": plain, "own": own}

    def _exception(self, found: dict[str, Any]) -> BaseException:
        kind = self.decode(found["own"]) if found["own"] else getattr(builtins, found["base"])
        if not _is_exception(kind):  # never call what the other process names
            return RuntimeError(str(found["arguments"]))
        try:
            return kind(*found["arguments"])
        except Exception:  # a class that takes other arguments than these
            return RuntimeError(f"{kind.__name__}: {found['arguments']}")

    def encode(self, value: Any) -> Any:
        """Return a value as JSON: copied if it is plain, else the number of the object."""
        kind: type[Any] = type(value)
        if kind in _PLAIN:
            return value
        if kind in (list, tuple, set, frozenset):
            return {kind.__name__: [self.encode(item) for item in value]}
        if isinstance(value, dict) and kind.__module__ in ("builtins", "collections"):  # a Counter arrives as a dict
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if kind.__name__ in _NUMBERS and kind.__module__ == _NUMBERS[kind.__name__]:
            return {kind.__name__: str(value)}
        if isinstance(value, type) and _is_built_in(value):
            return {"built_in": value.__name__}
        if kind is Reference or (isinstance(value, type) and "_number_of_code" in vars(value)):
            return {"yours": vars(value)["_number_of_code"]}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        description: dict[str, Any] | None = None
        if isinstance(value, types.ModuleType):
            description = {"module": value.__name__}
        elif _is_exception(value):
            base = next(filter(_is_built_in, value.__mro__))
            description = {"exception": [value.__name__, base.__name__]}
        return {"mine": self._numbers[id(value)], "what": description}

    def decode(self, value: Any) -> Any:
        """Return the value that :meth:`encode` made JSON of, in the other process."""
        if not isinstance(value, dict):
            return value
        ((kind, content), *_) = value.items()
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(self.decode(item) for item in content)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(content)
        if kind in ("complex", "range"):
            return getattr(builtins, kind)(*content)
        if kind in _NUMBERS:
            return getattr(importlib.import_module(_NUMBERS[kind]), kind)(content)
        if kind == "built_in":
            found = getattr(builtins, content)
            return found if isinstance(found, type) else None
        if kind == "yours":
            return self._own[content]
        if content not in self._known:
            self._known[content] = self.stand_in(content, value["what"])
        return self._known[content]

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def _receive(self) -> Any:
        line = self._reader.readline()
        if not line:
            os._exit(1)  # the other process has ended
        return json.loads(line)


_PLAIN = (type(None), bool, int, float, str)
_CHANGEABLE = (list, dict, set, bytearray)
_NUMBERS = {"Decimal": "decimal", "Fraction": "fractions"}


def _is_built_in(kind: type[Any]) -> bool:
    return getattr(builtins, kind.__name__, None) is kind


def _is_exception(kind: Any) -> TypeGuard[type[BaseException]]:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _overwrite(value: Any, new: Any) -> None:
    """Give a list, dictionary or set the content that a call has left in the other process's copy."""
    if type(value) not in _CHANGEABLE or type(value) is not type(new) or value == new:
        return
    if isinstance(value, list | bytearray):
        value[:] = new
    else:
        value.clear()
        value.update(new)


class Reference:
    """An object of the code, in the process of the tests."""

    def __init__(self, peer: Peer, number: int) -> None:
        vars(self).update(_peer_of_code=peer, _number_of_code=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return vars(self)["_peer_of_code"].ask("call", self, named, list(arguments))

    def __getattr__(self, name: str) -> Any:
        return vars(self)["_peer_of_code"].ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_peer_of_code"].ask("set", self, name, value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Reference) and vars(self)["_peer_of_code"].ask("operate", "__eq__", self, other) is True
        )

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Reference) and vars(self)["_peer_of_code"].ask("operate", "isinstance", value, self)

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Reference) and vars(self)["_peer_of_code"].ask("operate", "issubclass", value, self)

    def __exit__(self, *error: Any) -> Any:
        return vars(self)["_peer_of_code"].ask("operate", "__exit__", self, error[0], None, None)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__len__": len, "__iter__": iter, "__next__": next, "__str__": str, "__repr__": repr, "__bool__": bool, "__hash__": hash,
    "__int__": int, "__float__": float, "__abs__": abs, "__round__": round, "__reversed__": reversed,
    "isinstance": isinstance, "issubclass": issubclass,
    "__enter__": lambda value: type(value).__enter__(value),
    "__exit__": lambda value, *error: type(value).__exit__(value, *error),
}  # fmt: skip
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in ("getitem", "setitem", "delitem", "contains", "eq", "lt", "le", "gt", "ge", "neg", "invert", *_BINARY):
    _OPERATIONS[f"__{_name}__"] = getattr(operator, f"__{_name}__")


def _forward(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    def operate(self: Reference, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        return vars(self)["_peer_of_code"].ask("operate", name, *operands)

    return operate


for _name in _OPERATIONS:
    if _name.startswith("__") and _name not in ("__eq__", "__exit__"):
        setattr(Reference, _name, _forward(_name))
for _name in _BINARY:
    setattr(Reference, f"__r{_name}__", _forward(f"__{_name}__", is_reflected=True))


def run_code(source: str, reader: BinaryIO, writer: BinaryIO) -> None:
    """Run the code, and then do what the tests ask for."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    verbs: dict[str, Callable[..., Any]] = {
        "run": lambda: exec(compile(source, "code", "exec"), namespace),
        "names": lambda: {name: value for name, value in namespace.items() if not name.startswith("__")},
        "call": lambda function, named, arguments: function(*arguments, **named),
        "get": getattr,
        "set": setattr,
        "operate": lambda name, *operands: _OPERATIONS[name](*operands),
    }
    peer = Peer(reader, writer, verbs)
    peer.stand_in = lambda number, _: lambda *arguments: peer.ask("call", number, {}, list(arguments))
    peer.serve()


def run_tests(source: str, reader: BinaryIO, writer: BinaryIO) -> None:
    """Have the code run, run the tests with its names, and end with status 0 if their end is reached, else 1."""
    peer = Peer(reader, writer, {})
    # A function of the tests is known to the code by its number, and all that the code can do is to call it.
    peer._verbs["call"] = lambda number, named, arguments: peer._own[number](*arguments)

    def stand_in(number: int, description: Any) -> Any:
        description = description or {}
        name, base = description.get("exception", ("", ""))
        if _is_exception(kind := getattr(builtins, base, None)):
            return type(name, (kind,), {"_number_of_code": number})
        module = description.get("module", "")
        is_standard = module.partition(".")[0] in sys.stdlib_module_names and "__" not in module
        return importlib.import_module(module) if is_standard else Reference(peer, number)

    peer.stand_in = stand_in
    status = 1
    try:
        peer.ask("run")
        names = {name: value for name, value in peer.ask("names").items() if not hasattr(builtins, name)}
        exec(compile(source, "tests", "exec"), {"__name__": "__main__", **names})
        status = 0
    finally:
        os._exit(status)


def main(role: str, limits: str, *descriptor: str) -> None:
    source = sys.stdin.buffer.read().decode()
    confine(json.loads(limits))
    sys.set_int_max_str_digits(0)
    if role != "probe":
        reader, writer = os.fdopen(int(*descriptor), "rb"), os.fdopen(int(*descriptor), "wb", closefd=False)
        (run_tests if role == "tests" else run_code)(source, reader, writer)


if __name__ == "__main__":
    main(*sys.argv[1:])
