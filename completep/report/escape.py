"""Text from outside, made harmless. This is the only file that escapes text, and every renderer uses it.

A name in a CSV, a path or an error message may hold anything: HTML, Markdown, a terminal's own commands, characters
that reverse the order of reading, bytes that are not text. All of it is shown as plain text.
"""

import json
import operator
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from markupsafe import Markup

T = TypeVar("T")
JOINERS = "\u200c\u200d"  # invisible, and needed to write Persian, Hindi and many emoji


def visible(text: str) -> str:
    """The text with escapes for control characters, for changes of reading order and for bytes that are not text."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t" or character in JOINERS or character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a name that is not UTF-8
        code -= 0xDC00
    elif unicodedata.category(character) in ("Zs", "Co", "Cn"):  # blanks, private and unknown characters
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def harmless(value: T) -> T:
    """`visible` on every text in a value, such as a document. If nothing changes, the same object is returned."""
    if isinstance(value, str):
        return value if value.isprintable() else type(value)(visible(value))
    if isinstance(value, Mapping):
        pairs = [(harmless(k), harmless(v)) for k, v in value.items()]
        same = all(k is a and v is b for (k, v), (a, b) in zip(pairs, value.items(), strict=True))
        return value if same else dict(pairs)  # type: ignore[return-value]
    if isinstance(value, (tuple, list)):
        items = [harmless(item) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: new for f in fields(value) if (new := harmless(old := getattr(value, f.name))) is not old}
        return replace(value, **changed) if changed else value
    return value


def in_script(content: object) -> Markup:
    """JSON for a script element. HTML escapes have no effect there, so every "<" is escaped as JSON."""
    return Markup(json.dumps(content, allow_nan=False).replace("<", "\\u003c"))


def in_markdown(text: str) -> str:
    """Text in which no character means anything to Markdown, on one line."""
    line = re.sub(r"([\\`*_\[\]<>|#&~$])", r"\\\1", " ".join(text.split()))
    line = re.sub(r"(?i)\b(https?|ftp):(?=//)|\bwww(?=\.)", lambda match: f"{match[0]}\\", line)  # no links
    return re.sub(r"^([-+=](?=[ =-]|$)|\d+(?=[.)]( |$)))", _opening, line)


def _opening(match: "re.Match[str]") -> str:
    """What would open a list or underline a heading."""
    return f"{match[1]}\\" if match[1].isdigit() else f"\\{match[1]}"


def code_in_markdown(text: str) -> str:
    """Text to copy, between more backticks than it has in a row."""
    line = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if line[:1] == "`" or line[-1:] == "`" else f"{fence}{line}{fence}"
