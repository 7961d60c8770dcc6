"""Text → a corpus: units of work in a pool of processes, each finished for good, so that a restart goes on."""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np

from completep.data.corpus import FORMAT, MANIFEST, Corpus, Manifest, Shard, Splits, Vocabulary, load_corpus
from completep.data.documents import documents
from completep.data.shards import ShardWriter, cut_tail, writing
from completep.data.sources import Piece, units
from completep.data.tokenizer import Tokenizer, dtype_for, load_tokenizer
from completep.errors import UserError
from completep.files import write_new

Progress = Callable[[int, int, int], None]  # units done, units in all, tokens so far

MARKER = ".preparing"  # in a folder that is ours to write to, until its manifest is there


@dataclass(frozen=True)
class Unit:
    """A share of the work that one process does from beginning to end."""

    index: int
    pieces: tuple[Piece, ...]
    out: Path
    tokenizer: str
    tokenizer_fingerprint: str
    validation: float
    text_field: str

    @property
    def fingerprint(self) -> str:
        """All that determines its shards; finished shards with another fingerprint are made again."""
        content = {**asdict(self), "format": FORMAT}
        del content["out"], content["tokenizer"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> Path:
        return self.out / f".unit-{self.index:05d}.json"


@dataclass(frozen=True)
class Record:
    """What a finished unit leaves beside its shards; a split that got no document has no shard."""

    fingerprint: str
    train: Shard | None
    validation: Shard | None

    @property
    def shards(self) -> list[Shard]:
        return [shard for shard in (self.train, self.validation) if shard]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


def _silent(done: int, units: int, tokens: int) -> None: ...


def prepare(
    sources: Sequence[str],
    out: "str | Path",
    *,
    tokenizer: str = "bytes",
    validation: float = 0.01,
    text_field: str = "text",
    workers: int = os.cpu_count() or 1,
    progress: Progress = _silent,
) -> Corpus:
    """Tokenize `sources` into the folder `out`; the same call again finishes what a crash left, or returns at once.

    A source is a text file (one document), a .jsonl or .jsonl.gz (one object per line), a .parquet, a folder of
    those, hf:NAME[[:CONFIG]:SPLIT], or the word python. A share of the documents, chosen by their content, goes to
    validation; if that leaves one side empty, the last tokens do. Every document is followed by the end id.
    """
    if not 0 <= validation < 1:
        raise UserError(f"validation={validation}: must lie in [0, 1)", fix="0.01 holds out one document in a hundred")
    if workers < 1:
        raise UserError(f"workers={workers}: must be at least 1", fix="give 1 to stay in this process")
    out, loaded = Path(out).absolute(), load_tokenizer(tokenizer)
    work = [
        Unit(i, pieces, out, loaded.name, loaded.fingerprint, validation, text_field)
        for i, pieces in enumerate(units(sources, text_field))
    ]
    source = f"{' '.join(sources)} [inputs {hashlib.sha256(''.join(u.fingerprint for u in work).encode()).hexdigest()}]"
    if (out / MANIFEST).exists():
        return _existing(out, source)
    with _claimed(out):
        if (out / MANIFEST).exists():  # somebody else was faster
            return _existing(out, source)
        records = _all_done(work, workers, progress)
        splits = _splits(out, records, validation, dtype_for(loaded.vocabulary), sources)
        write_new(out / MANIFEST, _manifest(loaded, splits, source).to_json())
        return _tidied(load_corpus(out))


def _existing(out: Path, source: str) -> Corpus:
    """A finished corpus is never written over: it is the one that is asked for, or an error."""
    corpus = load_corpus(out)
    if corpus.manifest.source.rpartition(" [")[2] != source.rpartition(" [")[2]:
        raise UserError(
            f"{out} already holds a corpus made from other inputs: {corpus.manifest.source}",
            fix="choose another folder, or delete this one",
        )
    return _tidied(corpus)


def _manifest(tokenizer: Tokenizer, splits: Splits, source: str) -> Manifest:
    made_with = Vocabulary(tokenizer.name, tokenizer.vocabulary, tokenizer.end, tokenizer.fingerprint)
    return Manifest(FORMAT, made_with, dtype_for(tokenizer.vocabulary), splits, source)


def _splits(out: Path, records: Sequence[Record], share: float, dtype: str, sources: Sequence[str]) -> Splits:
    train = tuple(record.train for record in records if record.train)
    validation = tuple(record.validation for record in records if record.validation)
    if not train and not validation:
        raise UserError(f"there are no documents in {', '.join(sources)}", fix="name files that hold text")
    if share and not (train and validation):
        return cut_tail(out, train or validation, share, dtype)
    return Splits(train, validation)


def _tidied(corpus: Corpus) -> Corpus:
    """Remove what only an unfinished corpus needs; the marker last, for it says that the others are ours."""
    if (corpus.folder / MARKER).exists():
        listed = {shard.file for split in ("train", "validation") for shard in corpus.shards(split)}
        for pattern in (".unit-*.json", ".*.part", "train-*.bin", "validation-*.bin", MARKER):
            for path in corpus.folder.glob(pattern):
                if path.name not in listed:
                    path.unlink(missing_ok=True)
    return corpus


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """The folder is ours alone, as long as this process lives: two at once would write the same shards."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    if not (out / MARKER).exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty, and holds no corpus", fix="choose a new folder")
    with writing(out):
        marker = (out / MARKER).open("w")
    with marker:
        _lock(marker, out)
        yield


def _lock(marker: IO[str], out: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another process is preparing {out}", fix="wait for it, or choose another folder") from error


def _all_done(work: Sequence[Unit], workers: int, progress: Progress) -> list[Record]:
    records = {unit.index: record for unit in work if (record := _finished(unit))}
    todo = [unit for unit in work if unit.index not in records]
    tokens = sum(record.tokens for record in records.values())
    progress(len(records), len(work), tokens)
    with closing(_pooled(todo, workers) if workers > 1 and len(todo) > 1 else _one_by_one(todo)) as results:
        for index, record in results:
            records[index] = record
            tokens += record.tokens
            progress(len(records), len(work), tokens)
    return [records[unit.index] for unit in work]


def _finished(unit: Unit) -> Record | None:
    """The record of a unit that is done, with these very inputs, and whose shards are whole."""
    try:
        content = json.loads(unit.record.read_text())
        shards = {name: Shard(**content[name]) if content[name] else None for name in ("train", "validation")}
        record = Record(content["fingerprint"], **shards)
        itemsize = np.dtype(dtype_for(_tokenizer(unit).vocabulary)).itemsize
        whole = all((unit.out / s.file).stat().st_size == s.tokens * itemsize for s in record.shards)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if whole and record.fingerprint == unit.fingerprint else None


def _one_by_one(work: Sequence[Unit]) -> Generator[tuple[int, Record], None, None]:
    for unit in work:
        yield unit.index, _written(unit)


def _written(unit: Unit) -> Record:
    """Do a unit's work. Its record goes first and comes back last, so it never vouches for other shards."""
    tokenizer = _tokenizer(unit)
    dtype = dtype_for(tokenizer.vocabulary)
    train, validation = (ShardWriter(unit.out, split, unit.index, dtype) for split in ("train", "validation"))
    with writing(unit.record):
        unit.record.unlink(missing_ok=True)
    try:
        for piece in unit.pieces:
            for document in documents(piece, unit.text_field, in_parts=tokenizer.splits_at_newlines):
                writer = validation if document.is_held_out(unit.validation) else train
                for part in document.parts:
                    writer.add(tokenizer.encode(part))
                writer.add(np.array([tokenizer.end]))
        record = Record(unit.fingerprint, train.finish(), validation.finish())
    finally:
        train.drop()
        validation.drop()
    write_new(unit.record, json.dumps(asdict(record)))
    return record


def _tokenizer(unit: Unit) -> Tokenizer:
    return _loaded(unit.tokenizer, unit.tokenizer_fingerprint)


@lru_cache(maxsize=2)
def _loaded(name: str, fingerprint: str) -> Tokenizer:
    """Once per process; the fingerprint is part of the key, for a file may change under the same name."""
    tokenizer = load_tokenizer(name)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{name} has changed meanwhile", fix="run the same command again")
    return tokenizer


def _pooled(work: Sequence[Unit], workers: int) -> Generator[tuple[int, Record], None, None]:
    """Results as they come. An executor, not a Pool: it notices a worker that was killed, where a Pool waits forever."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(min(workers, len(work)), mp_context=get_context("spawn"), initializer=_worker_starts)
    try:
        places = {pool.submit(_attempted, unit): unit.index for unit in work}
        for future in as_completed(places):
            result = future.result()
            if not isinstance(result, Record):
                raise UserError(result[0], fix=result[1])
            yield places[future], result
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps for want of memory",
            fix="run the same command again, with fewer workers: finished parts are kept. "
            "In a script of yours, call prepare under `if __name__ == '__main__':`",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _attempted(unit: Unit) -> Record | tuple[str, str]:
    """A UserError goes home as its two halves, since an exception with a keyword does not survive pickling."""
    try:
        return _written(unit)
    except UserError as error:
        return error.what, error.fix


def _worker_starts() -> None:
    """One thread per process, no farewell on Ctrl-C, and no life after the parent's."""
    import signal
    import threading
    from multiprocessing import parent_process

    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
