"""Extract English prose from a file: the docstrings of Python code, and the paragraphs of documentation.

Markup, code, tables, legal boilerplate and everything that does not look like English sentences is left out.
Docstrings are found with a regular expression, because `ast.parse` would take minutes for some 24 000 files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_QUOTES = re.compile("\"\"\"|'''")


def extract_docstrings(code: str) -> Iterator[str]:
    """Yield the triple-quoted strings that are statements: docstrings of modules, classes, functions and attributes.

    The first line of each keeps the indentation that the statement has in the file, so that all lines of a paragraph
    are indented alike.
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
