"""Collect a text corpus from the English documentation on any machine that has the project installed.

Docstrings, README files and release descriptions of the installed packages and the standard library, without markup, code
and repetitions, are tens of megabytes of prose by many authors. No package is imported; files are only read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from pipelines.storage import check_empty, created_at_once

NUM_BYTES_DEFAULT = 24_000_000
NUM_BYTES_PER_MEMBER = 1_000_000
"""About the size of the members of a tar before compression; one ends with the document that completes it."""
MIN_DOCUMENT_CHARACTERS = 200
VALIDATION_ONE_IN = 50
MIN_CODE_CHARACTERS = 2_000

SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "node_modules", "licenses"}
"""Names of directories that are not searched.

`site-packages` is skipped because one lies below the standard library, and in a virtual environment it is not the
environment's own.
"""
SKIPPED_FILES = re.compile(
    r"licen[cs]e|copying|notice|authors|contributors|top_level\.txt|entry_points\.txt|.*requirements.*\.txt"
    r"|namespace_packages\.txt|sources\.txt|vendor\.txt|cmakelists\.txt",
    re.IGNORECASE,
)
PROSE_SUFFIXES = (".md", ".rst", ".txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProseDocument:
    """Prose of one file."""

    source: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSummary:
    """Counts of what `write_corpus` wrote; the numbers of bytes are those of the texts as UTF-8."""

    num_documents_train: int
    num_bytes_train: int
    num_documents_validation: int
    num_bytes_validation: int


def default_roots() -> tuple[Path, ...]:
    """Return the directories of the running environment's packages and of the standard library."""
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys(Path(paths[name]) for name in ("purelib", "platlib", "stdlib")))


def collect_prose(
    *, num_bytes: int = NUM_BYTES_DEFAULT, roots: Sequence[Path] | None = None
) -> Iterator[ProseDocument]:
    """Yield the documents of the files below `roots` (None: `default_roots()`), with at most `num_bytes` bytes of UTF-8.

    Files are visited in the order of a hash of their path, so that any limit keeps the same mixture of packages. A paragraph
    that occurred before is omitted, and so is a file with fewer than MIN_DOCUMENT_CHARACTERS left.
    """
    if num_bytes <= 0:
        raise ValueError(f"num_bytes is {num_bytes}; expected a positive number of bytes")
    seen: set[bytes] = set()
    for path, source in _list_files(default_roots() if roots is None else roots):
        try:
            raw = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # A file that is unreadable or not in UTF-8 is skipped, as there are enough others.
        # The long description of a package follows the headers.
        prose = raw.partition("\n\n")[2] if path.name == "METADATA" else raw
        paragraphs = []
        for raw_text in extract_docstrings(raw) if path.suffix == ".py" else [prose]:
            for paragraph in extract_paragraphs(raw_text):
                # All whitespace is already reduced to single spaces, so only the case is left to normalise.
                digest = hashlib.blake2b(paragraph.lower().encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs)
        if len(text) < MIN_DOCUMENT_CHARACTERS:
            continue
        num_bytes -= len(text.encode())
        if num_bytes < 0:
            return
        yield ProseDocument(source=source, text=text)


def write_corpus(
    directory: Path, *, num_bytes: int = NUM_BYTES_DEFAULT, num_shards: int = 4, roots: Sequence[Path] | None = None
) -> CorpusSummary:
    """Write `train/prose-*.jsonl.zst.tar`, in the layout of OpenWebText2, and `validation/prose-00000.jsonl.zst`.

    A hash of a document's text decides its split; about one in VALIDATION_ONE_IN documents goes to validation. The same
    documents give the same bytes. `directory` appears only when it is complete, through a rename.
    """
    if num_shards <= 0:
        raise ValueError(f"num_shards is {num_shards}; expected a positive number of archives")
    check_empty(directory)
    num_documents = {"train": 0, "validation": 0}
    num_text_bytes = {"train": 0, "validation": 0}
    with created_at_once(directory) as staging:
        for split in num_documents:
            (staging / split).mkdir(parents=True)
        shards: list[list[bytearray]] = [[] for _ in range(num_shards)]  # the members of each, before compression
        validation = bytearray()
        for document in collect_prose(num_bytes=num_bytes, roots=roots):
            text = document.text.encode()
            record = json.dumps({"text": document.text, "meta": {"source": document.source}}).encode() + b"\n"
            digest = hashlib.blake2b(text, digest_size=8).digest()
            split = "validation" if int.from_bytes(digest, "big") % VALIDATION_ONE_IN == 0 else "train"
            if split == "train":
                members = shards[num_documents[split] % num_shards]
                if not members or len(members[-1]) >= NUM_BYTES_PER_MEMBER:
                    members.append(bytearray())
                members[-1] += record
            else:
                validation += record
            num_documents[split] += 1
            num_text_bytes[split] += len(text)
        for number, members in enumerate(shards):
            if members:
                _write_tar(staging / "train" / f"prose-{number:05d}.jsonl.zst.tar", members)
        for split, number in num_documents.items():
            if number == 0:
                raise ValueError(
                    f"num_bytes = {num_bytes} leaves no document for the {split} split: choose a larger number"
                )
        (staging / "validation" / "prose-00000.jsonl.zst").write_bytes(zstandard.compress(validation))
    return CorpusSummary(
        num_documents_train=num_documents["train"],
        num_bytes_train=num_text_bytes["train"],
        num_documents_validation=num_documents["validation"],
        num_bytes_validation=num_text_bytes["validation"],
    )


def write_code(directory: Path, *, num_documents: int = 40, roots: Sequence[Path] | None = None) -> int:
    """Write `code-00000.jsonl.zst` with Python source, text of another kind than the prose of `write_corpus`.

    A document is the beginning of a file of at least MIN_CODE_CHARACTERS below `roots`; at most `num_documents` are written.
    Their number is returned. `directory` appears only when it is complete.

    Raises:
        FileExistsError: if `directory` already exists and is not an empty directory.
        FileNotFoundError: if a root is not a directory.
    """
    check_empty(directory)
    lines: list[bytes] = []
    for path, source in _list_files(default_roots() if roots is None else roots):
        if path.suffix == ".py" and len(lines) < num_documents:
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) >= MIN_CODE_CHARACTERS:
                record = {"text": text[:MIN_CODE_CHARACTERS], "meta": {"source": source}}
                lines.append(json.dumps(record).encode() + b"\n")
    with created_at_once(directory) as staging:
        (staging / "code-00000.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines)))
    return len(lines)


def _write_tar(path: Path, members: Sequence[bytearray]) -> None:
    with tarfile.open(path, mode="w") as tar:
        for number, member in enumerate(members):
            data = zstandard.compress(member)
            # The member's time stamp and owner are 0 by default, so that equal documents give equal archives.
            info = tarfile.TarInfo(f"{path.name.partition('.')[0]}/{number:05d}.jsonl.zst")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _list_files(roots: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return the files to read and their paths relative to their root, in the order of a hash of the relative path."""
    files = []
    for root in roots:
        if not root.is_dir():
            raise FileNotFoundError(f"root {str(root)!r} is not a directory")
        for directory, directories, names in os.walk(root):
            directories[:] = [name for name in directories if name not in SKIPPED_DIRECTORIES and name[0] != "."]
            for name in names:
                is_prose = name == "METADATA" or name.endswith(PROSE_SUFFIXES)
                if name.endswith(".py") or (is_prose and not SKIPPED_FILES.match(name)):
                    path = os.path.join(directory, name)
                    files.append((Path(path), os.path.relpath(path, root).replace(os.sep, "/")))
    return sorted(files, key=lambda item: (hashlib.blake2b(item[1].encode(), digest_size=8).digest(), item))


_QUOTES = re.compile("\"\"\"|'''")


def extract_docstrings(code: str) -> Iterator[str]:
    """Yield the triple-quoted strings that are statements: docstrings of modules, classes, functions and attributes.

    The first line of each keeps its indentation, so that all lines of a paragraph are indented alike.
    """
    end = 0
    while opening := _QUOTES.search(code, end):
        start = opening.end()
        end = code.find(opening[0], start)
        if end < 0:
            return
        text = code[start:end]
        end += 3
        line_start = code.rfind("\n", 0, opening.start()) + 1
        prefix = code[line_start : opening.start()]
        indentation = prefix.rstrip("rRuU")
        if indentation and not indentation.isspace():
            continue  # The string is assigned, passed, in a comment, of bytes, or an f-string.
        before = code[max(0, line_start - 200) : line_start].rstrip()
        if not before.endswith(("(", ",", "=", "[", "{", "+", "\\", "%", "return")):
            yield indentation + text


_PROSE_DIRECTIVES = (
    "note warning tip hint important attention caution danger seealso admonition topic rubric deprecated versionadded "
    "versionchanged versionremoved py function method class module attribute data"
)
PROSE_DIRECTIVES = frozenset(_PROSE_DIRECTIVES.split())
"""Directives of reStructuredText whose content is kept; the content of others, such as `code-block`, is dropped."""

_DIRECTIVE = re.compile(r"\.\. ([\w-]*)")
_NOISE = re.compile(
    r"\$ |\||\+[-=]|#!|@|:\w+:$|\.\. |!\[|\[!\[|In \[|Out\[|:alt:|[\W_]+$"  # Tables, rules, badges and prompts.
    r"|[`*]*[\w.*]+[`*]*(?:, [\w.*]+)* : [^\n]*[^\n.]$"  # `name : type`, the form in which numpy documents parameters.
    r"|:r?type\b"
)
_ITEM = re.compile(
    r"(?:[-*+\u2022]|\d+[.)]|\(\d+\)|#+)\s+"
    r"|:[a-z]+(?: [^:]*)?:(?!`)\s*"  # `:param type name:`
    r"|[`*]*[a-z_][\w.*]*[`*]*(?:\s*\([^()]*(?:\([^()]*\)[^()]*)*\))?\s?:(?::|\s+|$)"  # `name (type):`
)


def extract_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose in reStructuredText, Markdown or plain text, each joined to one line."""
    lines: list[str] = []
    indent_first = 0
    is_item = False  # Whether the paragraph is a list item or describes a parameter; its later lines may be indented.
    fence = ""  # The marker that closes the current Markdown code block, if the line is in one.
    indent_literal: int | None = None  # Lines indented deeper than this belong to a literal block of reStructuredText.
    in_doctest = False  # Whether the line is part of a doctest, which ends at the next blank line.
    for line in [*text.expandtabs().split("\n"), ""]:
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if fence or stripped.startswith(("```", "~~~")):
            if not fence:
                fence = stripped[:3]
            elif stripped.startswith(fence):
                fence = ""
            stripped = ""
        elif stripped and indent_literal is not None:
            if indent > indent_literal:
                stripped = ""
            else:
                indent_literal = None
        if stripped.startswith(">>>"):
            in_doctest = True
        elif not stripped:
            in_doctest = False
        directive = _DIRECTIVE.match(stripped)
        if (directive and directive[1] not in PROSE_DIRECTIVES) or (not directive and stripped.endswith("::")):
            indent_literal = indent
        is_noise = not stripped or in_doctest or _NOISE.match(stripped) is not None
        item = None if is_noise else _ITEM.match(stripped)
        if lines and (is_noise or item or (indent != indent_first and not (is_item and indent > indent_first))):
            if prose := _clean_prose(" ".join(lines)):
                yield prose
            lines = []
        if is_noise:
            continue
        if not lines:
            indent_first = indent
            is_item = item is not None
        lines.append(stripped[item.end() :] if item else stripped)


_HTML = re.compile(r"<!--.*?-->|</?[a-zA-Z][^<>]*>")
_LINK = re.compile(r"!?\[([^\[\]]+)\](?:\([^()\s]*(?: \"[^\"]*\")?\)|\[[^\[\]]*\])")
_ROLE = re.compile(r":[a-z:]+:`[~!.]*([^`<]*?)(?: ?<[^`>]*>)?`")
_RST_LINK = re.compile(r"`([^`<>]+?) ?<[^`>]*>`_{0,2}")
_MARKS = re.compile(r"\s?\[\w+\]_(?!\w)|`+(?:_{1,2}(?!\w))?|\*\*|(?<!\w)[*|](?=\w)|(?<=\w)[*|](?!\w)|\\(?=\W)")
LEGAL_PHRASES = (
    "copyright",
    "licensed under",
    "license is",
    "permission is hereby",
    "warrant",
    "redistribut",
    "merchantab",
    "public license",
    "coding:",
)

_FUNCTION_WORDS = (
    "a an the this that these those it its he she they we you your i of in on at by for from to into with without as "
    "about between through over under after before during is are was were be been being has have had do does did will "
    "would can could should may might must not no and or but if then than when while which who whose what how where "
    "there here so such only also all any each other some more most same both either one because since until unless "
    "their our them us his her out up"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
MIN_FUNCTION_WORDS = 2
MIN_FUNCTION_WORD_SHARE = 0.2
MIN_LETTER_SHARE = 0.92
_LETTERS = bytes([*range(65, 91), *range(97, 123)]) + b" "


def _clean_prose(paragraph: str) -> str | None:
    """Return the paragraph without inline markup, or None if it does not look like English sentences.

    English is recognised by the share of function words and of letters; legal boilerplate is rejected too.
    """
    # The cheap test comes first: half of the paragraphs fail it.
    words = paragraph.lower().split()
    num_function_words = sum(map(FUNCTION_WORDS.__contains__, words))
    if num_function_words < max(MIN_FUNCTION_WORDS, MIN_FUNCTION_WORD_SHARE * len(words)):
        return None
    if "<" in paragraph or ":`" in paragraph:
        paragraph = _HTML.sub("", _RST_LINK.sub(r"\1", _ROLE.sub(r"\1", paragraph)))
    if "](" in paragraph or "][" in paragraph:
        paragraph = _LINK.sub(r"\1", paragraph)
    if any(mark in paragraph for mark in ("`", "*", "|", "\\", "]_")):
        paragraph = _MARKS.sub("", paragraph)
    paragraph = " ".join(paragraph.replace("::", ":").split())
    encoded = paragraph.encode()
    if len(encoded.translate(None, _LETTERS)) > (1 - MIN_LETTER_SHARE) * len(encoded):
        return None
    lower = paragraph.lower()
    return None if any(phrase in lower for phrase in LEGAL_PHRASES) else paragraph
