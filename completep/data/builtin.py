"""A corpus that every machine has: the source of Python's standard library."""

import hashlib
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path

from completep.data.corpus import MANIFEST, Corpus, load_corpus
from completep.data.prepare import prepare
from completep.data.sources import python_sources
from completep.data.tokenizer import Tokenizer, load_tokenizer
from completep.errors import UserError
from completep.files import cache_folder


def builtin_corpus(tokenizer: str = "bytes") -> Corpus:
    """The standard library as a corpus, made once and kept in your cache folder."""
    folder = cache_folder() / _name(load_tokenizer(tokenizer))
    if not (folder / MANIFEST).exists():
        _make(folder, tokenizer)
    try:
        return load_corpus(folder)
    except UserError as error:
        raise UserError(error.what, fix=f"delete {folder}; it will be made again") from error


def _name(tokenizer: Tokenizer) -> str:
    """A folder name that differs between Python versions, library contents and tokenizers."""
    root = Path(sysconfig.get_path("stdlib"))
    content = [tokenizer.fingerprint, *(f"{p.relative_to(root)} {p.stat().st_size}" for p in python_sources())]
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]
    return f"python-{platform.python_version()}-{re.sub(r'[^a-zA-Z0-9]', '_', Path(tokenizer.name).stem)}-{digest}"


def _make(folder: Path, tokenizer: str) -> None:
    """Make the corpus in a private folder and rename it. Of two processes, the slower one uses the other's result."""
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
