"""What a command runs, by content: scripts and configurations among its words, and what a Python script imports from
beside itself. Other files, such as data or a log, count only if they are named as sources.

A run's identity holds these hashes, so that a changed script is another run.
"""

import ast
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from completep.errors import UserError
from completep.files import sha256_of

Hashes = tuple[tuple[str, str], ...]  # (name, sha256), sorted
SUFFIXES = (".py", ".sh", ".bash", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".conf", ".gin")
WHOLE = 2**28  # bytes: larger files are known by their size, their first and their last MiB
MOST_FILES = 500  # that one script imports from beside itself


def find_scripts(words: Sequence[str], folder: Path, more: Sequence[str] = ()) -> Hashes:
    """The files that a command names, with what they import from beside themselves, and `more`."""
    files: dict[str, Path] = {}
    for i, word in enumerate(words):
        path = folder / word
        if i and words[i - 1] == "-m":
            path = _module(folder, word) or path
        if "{" in word or not path.is_file() or not (path.suffix in SUFFIXES or os.access(path, os.X_OK)):
            continue
        if i == 0 and path.suffix not in SUFFIXES:
            continue  # the interpreter is not a part of the script
        files[word] = path
        files |= {_beside(path, other): other for other in local_imports(path)}
    for name in more:
        if not (folder / name).is_file():
            raise UserError(f"there is no file {name!r} to take into account", fix="check the name")
        files[name] = folder / name
    return tuple(sorted((name, file_hash(path)) for name, path in files.items()))


def _beside(script: Path, other: Path) -> str:
    return other.relative_to(script.parent).as_posix()


def _module(folder: Path, name: str) -> Path | None:
    place = folder.joinpath(*name.split("."))
    candidates = (place.with_suffix(".py"), place / "__main__.py")
    return next((path for path in candidates if path.is_file()), None)


def local_imports(script: Path) -> set[Path]:
    """Python files beside a script that it imports, and that those import; found in the source, nothing is run."""
    found: set[Path] = set()
    todo = [script]
    while todo and len(found) < MOST_FILES:
        for path in _imported(todo.pop(), script.parent):
            if path not in found and path != script:
                found.add(path)
                todo.append(path)
    return found


def _imported(file: Path, root: Path) -> Iterator[Path]:
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # the run itself will say what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.ImportFrom):
            here = file.parent.joinpath(*([".."] * (node.level - 1))).resolve()
            module = f"{node.module}." if node.module else ""
            yield from _inside(root, (_place(here, f"{module}{alias.name}") for alias in node.names))
            yield from _inside(root, (_place(here, node.module or ""),))
            continue
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from _inside(root, (_place(root, ".".join(parts[: i + 1])) for i in range(len(parts))))


def _place(root: Path, name: str) -> Path | None:
    place = root.joinpath(*name.split(".")) if name else root
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)


def _inside(root: Path, paths: "Iterator[Path | None] | tuple[Path | None, ...]") -> Iterator[Path]:
    yield from (path for path in paths if path is not None and path.is_relative_to(root))


def file_hash(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size <= WHOLE:
            return sha256_of(path)
        with path.open("rb") as file:
            digest = hashlib.sha256(f"{size}".encode() + file.read(2**20))
            file.seek(-(2**20), 2)
            digest.update(file.read())
        return digest.hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix="make it readable") from error
