"""A corpus that is on every machine: the source of Python's own standard library."""

import hashlib
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path

from completep.data.corpus import MANIFEST, Corpus, load_corpus
from completep.data.tokenizer import Tokenizer, load_tokenizer
from completep.errors import UserError

# Some distributions strip the tests, so they would make the corpus differ from machine to machine.
NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_sources() -> list[Path]:
    """The running Python's own library, about 11 MB of text."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for parent, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if name not in NOT_THE_LIBRARY and (Path(parent) / name) != _bundled(root)
        ]
        found += [Path(parent) / name for name in files if name.endswith(".py")]
    if not found:
        raise UserError(f"this Python has no library sources under {root}", fix="name text of your own")
    return sorted(found)


def _bundled(root: Path) -> Path:
    return root / "ensurepip" / "_bundled"


def builtin_corpus(tokenizer: str = "bytes") -> Corpus:
    """The library as a corpus, made once and kept in the user's cache."""
    folder = _cache() / _name(load_tokenizer(tokenizer))
    if not (folder / MANIFEST).exists():
        _make(folder, tokenizer)
    try:
        return load_corpus(folder)
    except UserError as error:
        raise UserError(error.what, fix=f"delete {folder}; it will be made again") from error


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "completep"


def _name(tokenizer: Tokenizer) -> str:
    """Another Python, another library or another tokenizer is another folder."""
    root = Path(sysconfig.get_path("stdlib"))
    content = [tokenizer.fingerprint, *(f"{p.relative_to(root)} {p.stat().st_size}" for p in python_sources())]
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]
    return f"python-{platform.python_version()}-{re.sub(r'[^a-zA-Z0-9]', '_', Path(tokenizer.name).stem)}-{digest}"


def _make(folder: Path, tokenizer: str) -> None:
    """In a folder of its own, then renamed: of two processes at once one is first, and the other uses its result."""
    from completep.data.prepare import prepare  # which reads python_sources from here

    private = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        prepare(["python"], private, tokenizer=tokenizer, workers=1)
        os.rename(private, folder)
    except OSError as error:
        if not (folder / MANIFEST).exists():
            raise UserError(
                f"cannot write to {folder.parent}: {error.strerror}",
                fix="set XDG_CACHE_HOME to a folder that you can write to",
            ) from error
    finally:
        if private:
            shutil.rmtree(private, ignore_errors=True)
