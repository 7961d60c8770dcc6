"""Corpora that every machine has: the sources of Python's standard library, 11 MB, and of torch, 46 MB."""

import hashlib
import os
import platform
import re
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from completep.data.corpus import MANIFEST, Corpus, load_corpus
from completep.data.prepare import prepare
from completep.data.sources import library_sources
from completep.data.tokenizer import Tokenizer, load_tokenizer
from completep.errors import UserError
from completep.files import cache_folder

VALIDATION = 0.125  # of the files, so that the standard library gives more than 1 MB


def builtin_corpus(source: str = "python", tokenizer: str = "bytes") -> Corpus:
    """A built-in corpus, made once and kept in your cache folder."""
    folder = cache_folder() / _name(source, load_tokenizer(tokenizer))
    if not (folder / MANIFEST).exists():
        _make(folder, source, tokenizer)
    try:
        return load_corpus(folder)
    except UserError as error:
        raise UserError(error.what, fix=f"delete {folder}; it will be made again") from error


def _name(source: str, tokenizer: Tokenizer) -> str:
    """A folder name that differs between versions and contents of the library, and tokenizers."""
    root, files = library_sources(source)
    skipped = len(str(root)) + 1
    sizes = (f"{str(path)[skipped:]} {os.stat(path).st_size}" for path in files)
    content = [tokenizer.fingerprint, f"validation {VALIDATION}", *sizes]
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]
    version = platform.python_version() if source == "python" else metadata.version(source)
    words = (source, version, Path(tokenizer.name).stem)
    return "-".join([*(re.sub(r"[^a-zA-Z0-9.]", "_", word) for word in words), digest])


def _make(folder: Path, source: str, tokenizer: str) -> None:
    """Make the corpus in a private folder and rename it. Of two processes, the slower one uses the other's result."""
    private = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        prepare([source], private, tokenizer=tokenizer, validation=VALIDATION, workers=1)
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
