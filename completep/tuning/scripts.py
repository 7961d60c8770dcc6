"""The hashes of the files that a command runs. They are part of a run's identity: a changed script is another run.

These are the scripts and configurations among the words of the command, and what a Python script imports: from its own
folder, from the working directory (`python -m`), or from a folder in the working directory that PYTHONPATH names. Other
files, such as data, count only if they are given as sources.
"""

import ast
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from completep.errors import UserError
from completep.files import sha256_of
from completep.tuning.template import PLACE, placeholders

Hashes = tuple[tuple[str, str], ...]  # (name, sha256), sorted
SUFFIXES = (".py", ".sh", ".bash", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".conf", ".gin")
WHOLE = 2**28  # bytes; of a larger file, only the size, the first and the last MiB are hashed
MOST_FILES = 500  # imported by one script


def find_scripts(words: Sequence[str], folder: Path, more: Sequence[str] = ()) -> Hashes:
    """The files that a command names, with what they import, and `more`."""
    files: dict[str, Path] = {}
    for i, word in enumerate(words):
        by_name = bool(i) and words[i - 1] == "-m"
        for path in _modules(folder, word) if by_name else _files(folder, word, first=i == 0):
            roots = [folder if by_name else path.parent, *_python_path(folder)]
            for one in (path, *local_imports(path, roots)):
                files[_name(one, folder)] = one
    for name in more:
        if not (folder / name).is_file():
            raise UserError(f"sources: there is no file {name!r}", fix=f"give a path from {folder}")
        files[name] = folder / name
    return tuple(sorted((name, file_hash(path)) for name, path in files.items()))


def _name(path: Path, folder: Path) -> str:
    return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()


def _files(folder: Path, word: str, *, first: bool) -> list[Path]:
    """The scripts and configurations that a word names: FILE, KEY=FILE, or several, as in configs/{width}.yaml."""
    if first and os.sep not in word:
        return []  # a program on the PATH, not a script of the user
    texts = (word, word.partition("=")[2]) if "=" in word else (word,)
    return [path for text in texts if text for path in _matching(folder, text) if _is_script(path)]


def _matching(folder: Path, text: str) -> list[Path]:
    names = placeholders(text)
    if not names:
        return [folder / PLACE.sub(lambda match: match[0][0], text)]
    if "folder" in names or not text.endswith(SUFFIXES):
        return []
    ends = [0, *(end for match in PLACE.finditer(text) for end in match.span()), len(text)]
    pattern = "*".join(glob.escape(text[a:b]) for a, b in zip(ends[::2], ends[1::2], strict=True))
    return sorted(Path(path) for path in glob.glob(str(Path(glob.escape(str(folder)), pattern))))


def _is_script(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        if path.suffix in SUFFIXES:
            return True
        with path.open("rb") as file:
            return os.access(path, os.X_OK) and file.read(2) == b"#!"
    except (OSError, ValueError):  # a word that is no path, such as one that is too long
        return False


def _modules(folder: Path, name: str) -> list[Path]:
    """The files that `python -m a.b` runs: a/__init__.py, and a/b.py or a/b/__main__.py."""
    parts = name.split(".")
    packages = [folder.joinpath(*parts[: i + 1], "__init__.py") for i in range(len(parts))]
    place = folder.joinpath(*parts)
    candidates = (*packages, place.with_suffix(".py"), place / "__main__.py")
    return [path for path in candidates if _is_script(path)]


def _python_path(folder: Path) -> list[Path]:
    """Folders of PYTHONPATH inside the working directory. Packages installed elsewhere do not count."""
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    places = [Path(os.path.realpath(folder / entry)) for entry in given]  # Path.resolve raises on a loop of links
    return [place for place in places if place.is_relative_to(folder.resolve())]


def local_imports(script: Path, roots: Sequence[Path]) -> set[Path]:
    """The Python files that a script imports from these folders, directly or not. The source is parsed, not run."""
    imported: set[Path] = set()
    todo = [script]
    while todo and len(imported) < MOST_FILES:
        for path in _imported(todo.pop(), roots):
            if path not in imported and path != script:
                imported.add(path)
                todo.append(path)
    return imported


def _imported(file: Path, roots: Sequence[Path]) -> Iterator[Path]:
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # the run itself will say what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from _absolute(roots, [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from _absolute(roots, [f"{node.module}.{alias.name}" for alias in node.names])
        elif isinstance(node, ast.ImportFrom):
            here = file.parent.joinpath(*([".."] * (node.level - 1))).resolve()
            module = f"{node.module}." if node.module else ""
            names = ("", node.module or "", *(f"{module}{alias.name}" for alias in node.names))
            places = (_place(here, name) for name in names)
            yield from (p for p in places if p is not None and any(p.is_relative_to(root) for root in roots))


def _absolute(roots: Sequence[Path], names: Sequence[str]) -> Iterator[Path]:
    """The files of a module and of the packages above it, from the first folder that has its top package."""
    for name in names:
        parts = name.split(".")
        root = next((r for r in roots if _place(r, parts[0]) or (r / parts[0]).is_dir()), None)
        if root is not None:
            places = (_place(root, ".".join(parts[: i + 1])) for i in range(len(parts)))
            yield from (place for place in places if place is not None)


def _place(root: Path, name: str) -> Path | None:
    place = root.joinpath(*name.split(".")) if name else root
    candidates = ((place.with_suffix(".py"),) if name else ()) + (place / "__init__.py",)
    return next((p for p in candidates if p.is_file()), None)


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
