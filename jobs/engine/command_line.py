"""The command line of a job: `python -m jobs.<job> <preset> [--section.field value …] [--dry-run]`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import io
import itertools
import json
import os
import re
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import tyro

from jobs.engine import FailedError
from jobs.engine.fields import PRESET, apply_config_file, flat_fields, read_config_file, save_config_file
from jobs.engine.masking import masked, printable
from jobs.engine.revision import LOCKED_VARIABLE, check_locked
from tempnet.command import COMMAND_VARIABLE

Config = TypeVar("Config")

FAILED, REFUSED, INTERRUPTED, UNREAD = 1, 2, 128 + signal.SIGINT, 128 + signal.SIGPIPE
"""Exit statuses of every job besides 0: the run failed, the request was refused, the user interrupted it, or nobody reads
its output."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def parse_preset(
    presets: Mapping[str, Callable[[], Config]], arguments: Sequence[str], *, job: str, purpose: str
) -> tuple[Config, bool]:
    """Parse the arguments into a configuration and whether a dry run is wanted; `--help` lists the presets.

    `--config FILE` sets fields of the preset first, and `--save FILE` writes all of them (`jobs.engine.fields`). What is
    refused, such as an unknown preset, ends the process with a message.
    """
    command = f"python -m {job if '.' in job else f'jobs.{job}'}"
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, presets))
        lines = "\n".join(f"  {name:<{width}}  {_first_line(preset)}" for name, preset in presets.items())
        print(
            f"{purpose}\n\nusage: {command} PRESET [--config FILE] [--section.field value …] [--dry-run [--save FILE]]\n\n"
            f"presets (PRESET --help lists the fields):\n{lines}"
        )
        raise SystemExit(0 if arguments else REFUSED)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    own.add_argument("--config")
    own.add_argument("--save")
    own.add_argument("--dry-run", action="store_true")
    try:
        given, rest = own.parse_known_args(arguments)
        if "" in (given.config, given.save):  # such as a variable of the shell that is not set
            raise ValueError("--config and --save need the name of a file")
        values = read_config_file(given.config) if given.config else {}
    except (argparse.ArgumentError, ValueError) as error:
        fail(str(error))
    name = rest.pop(0) if rest and not rest[0].startswith("-") else str(values.get(PRESET, ""))
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(presets)}"
        if other := job_of(name):
            hint = f"it is one of jobs.{other}"
        fail(f"preset {name!r} is unknown: {hint}")
    if given.save and not given.dry_run:
        fail("--save writes the configuration of a dry run: add --dry-run")
    with refusals_on_one_line():
        default = apply_config_file(presets[name](), values, given.config)
        config = tyro.cli(
            type(default),
            default=default,
            args=_without_alternatives(default, rest),
            prog=f"{command} {name}",
            config=(tyro.conf.AvoidSubcommands,),
        )
    if given.save:
        try:
            save_config_file(config, name, given.save)
        except OSError as error:
            fail(f"--save {given.save}: {error.strerror}")
    return config, given.dry_run


def parse_options(kind: type[Config], arguments: Sequence[str], *, job: str, description: str | None) -> Config:
    """Parse the options of a job without presets; exits the process with a message on one that is unknown or refused."""
    with refusals_on_one_line():
        return tyro.cli(kind, args=arguments, prog=f"python -m jobs.{job}", description=description)


def _without_alternatives(preset: object, arguments: list[str]) -> list[str]:
    """Return the arguments and `None` for each field of the preset whose alternative they give (`jobs.engine.fields`)."""
    given = {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        given[name.replace("_", "-")] = value if equals else following
    cleared = []
    for name, _, metadata in flat_fields(preset):
        if other := metadata.get("alternative"):
            option, other = (f"--{path}".replace("_", "-") for path in (name, f"{name.rpartition('.')[0]}.{other}"))
            if given.get(option, "None") != "None" and other not in given:
                cleared += [other, "None"]
    return arguments + cleared


@contextlib.contextmanager
def refusals_on_one_line() -> Iterator[None]:
    """Report a value that a configuration's constructor refuses by :func:`fail`; what tyro refuses stays in its box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as ended:
        error = ended.__context__
        while error is not None and not isinstance(error, ValueError):
            error = error.__context__
        if error and any(
            frame.f_code.co_name == "__post_init__" for frame, _ in traceback.walk_tb(error.__traceback__)
        ):
            fail(str(error))
        print(said.getvalue(), end="", file=sys.stderr)
        raise
    except ValueError as error:
        fail(str(error))
    print(said.getvalue(), end="", file=sys.stderr)


def run_job(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a job on the arguments of this process and exit with its status."""
    # The imports of a job leave a million objects, hardly any of them garbage, and to look through them again and again takes
    # a tenth of the time to the first step. The training loop sets it lower again.
    gc.set_threshold(100_000)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends a job as Ctrl-C does
    reach_loopback_directly(os.environ)
    if os.environ.get(LOCKED_VARIABLE):
        try:
            check_locked()
        except ValueError as error:
            fail(str(error))
    try:
        try:
            raise SystemExit(main(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        exit_interrupted()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _close_unread_output():
            raise SystemExit(UNREAD) from None
        # It is unexpected, and its text may hold an address with a password.
        print(printable(masked(traceback.format_exc())), file=sys.stderr, end="")
        raise SystemExit(FAILED) from None


def reach_loopback_directly(variables: MutableMapping[str, str]) -> None:
    """Have this machine's own servers reached without a proxy, which cannot reach them."""
    if not any(variables.get(name) for name in (*_PROXIES, *map(str.upper, _PROXIES))):
        return
    for name in ("no_proxy", "NO_PROXY"):
        # The lower-case name has precedence, so that one that is not set takes what the other one says.
        spared = [host for host in (variables.get(name) or variables.get("no_proxy", "")).split(",") if host.strip()]
        if "*" not in spared:
            variables[name] = ",".join([*spared, *(host for host in _LOOPBACK if host not in spared)])


def _close_unread_output() -> bool:
    """Return whether nobody reads the output any more, as after `| head`; what is left of it is then thrown away."""
    output = sys.stdout.fileno()
    poller = select.poll()
    poller.register(output, 0)
    if not any(events & select.POLLERR for _, events in poller.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def exit_interrupted(directory: str = "") -> NoReturn:
    """Report that Ctrl-C interrupted the job and exit with the status that shells expect."""
    rest = f"; the same command goes on from what is in {directory}" if directory else ""
    print(f"\ninterrupted{rest}", file=sys.stderr)
    raise SystemExit(INTERRUPTED)


@contextlib.contextmanager
def ending_in_one_line(directory: Callable[[], str] = str) -> Iterator[None]:
    """End the job in one line if the block refuses something (REFUSED), fails (FAILED) or is interrupted (INTERRUPTED).

    After Ctrl-C, the line names the directory that `directory` returns, if it returns one.
    """
    try:
        yield
    except KeyboardInterrupt:
        exit_interrupted(directory())
    except Exception as error:
        from pipelines.problems import TooManyProblemsError  # only now, because that loads pyarrow

        if isinstance(error, FailedError):
            fail(str(error), FAILED)
        if isinstance(error, ValueError | OSError | TooManyProblemsError):
            fail(str(error))
        raise


def fail(message: str, status: int = REFUSED) -> NoReturn:
    """Print an error message and exit with REFUSED if the user must change the request, or with FAILED otherwise."""
    print(f"error: {printable(with_hint(masked(message)))}", file=sys.stderr)
    raise SystemExit(status)


def show(text: str) -> None:
    """Print what may hold foreign text, such as names of files and generated words, without its control characters."""
    print(printable(text), flush=True)


def as_typed(words: Sequence[str]) -> str:
    """Return a job (`jobs.generate`) and its arguments as the user types them: with `tempnet` if that started this job."""
    if command := os.environ.get(COMMAND_VARIABLE):
        job, *rest = words
        return shlex.join([command, job.removeprefix("jobs.").replace("_", "-"), *rest])
    return f".venv/bin/python -m {shlex.join(words)}"


def _first_line(function: Callable[[], Config]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


_WORD = re.compile(r"[^\s'\"`:;,()]+")
_EXPORT = re.compile(r"(?:.*/)?(?!declutr-small/|triple-)([^/]+-small)/export(?:/.*)?")  # of a small preset
_SAMPLE = re.compile(r"(?:.*/)?data/sample(?:/.*)?")
# Patterns of the presets' names. A test checks them against the presets, which this package must not import.
_PRESETS = {
    "sweep": re.compile(r".*-rho-lr(?:-small)?"),
    "train_lm": re.compile(r"gpt2-(?:scratch|finetune|ce)(?:-small)?|(?:llama[12]-.*)?frozen(?:-small)?"),
    "train_clip": re.compile(r"clip-.*"),
    "train_sentences": re.compile(r"declutr-.*"),
    "train_images": re.compile(r"simclr-.*"),
    "train_classifier": re.compile(r"triple-entropy.*"),
}
_PLACEHOLDERS = ("'model' is no local directory", "tokenizer = 'model'")  # the path in the preset `frozen`
_NO_MODEL = "Transformers model"  # part of every message about a directory that is none


def with_hint(message: str) -> str:
    """Return an error message with what helps with the first path in it for which that is known.

    A path may be missing that a command makes, or be a directory that is no model of the wanted kind.
    """
    for word in _WORD.findall(message):
        if word.startswith("//"):  # a URI without its scheme
            continue
        hint = ""
        if word == "model" and any(text in message for text in _PLACEHOLDERS):
            return f"{message.rstrip('.')}. The preset `frozen` is for a model of your own: give --model.path"
        if (path := Path(word).expanduser()).exists():
            hint = _meant(path, word) if _NO_MODEL in message else ""
        elif word in ("data/train", "data/validation"):
            hint = "It stands for your own data: give --data.train, --data.validation and, for a model of yours, --model.path"
        elif _SAMPLE.fullmatch(word):
            hint = "The sample data are made by: python -m jobs.sample_data"
        elif (export := _EXPORT.fullmatch(word)) and (job := job_of(export[1])).startswith("train_"):
            hint = f"This model is made by: python -m jobs.{job} {export[1]}"
        if hint:
            return f"{message.rstrip('.')}. {hint}"
    return message


def _meant(directory: Path, name: str) -> str:
    """Say what was meant by a directory that is no model of the wanted kind; empty if that is not known."""
    if (directory / "export" / "config.json").is_file():
        return f"It is a run; its model is {name.rstrip('/')}/export"
    with suppress(OSError, ValueError):
        if {"embedding_size", "image_size"} <= json.loads((directory / "config.json").read_bytes()).keys():
            return (
                "It is an image–text model: give it --images in the place of --text, or score it by jobs.evaluate_clip"
            )
    return ""


def job_of(preset: str) -> str:
    """Return the job that has a preset of this name; empty if none has."""
    return next((job for job, names in _PRESETS.items() if names.fullmatch(preset)), "")
