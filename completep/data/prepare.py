"""Text → a corpus. The work is cut into units for a pool of processes. A restart keeps the finished units."""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from completep.data.corpus import FORMAT, MANIFEST, Corpus, Manifest, Shard, Splits, Vocabulary, load_corpus
from completep.data.documents import MAX_DOCUMENT, documents
from completep.data.shards import ShardWriter, cut_tail, writing
from completep.data.sources import Piece, units
from completep.data.tokenizer import Tokenizer, dtype_for, load_tokenizer
from completep.errors import UserError
from completep.files import lock, read_bytes, sha256_of, write_new

Progress = Callable[[int, int, int], None]  # units done, all units, tokens so far
Results = Generator[tuple[int, "Record"], None, None]  # index of a unit, its record

MARKER = ".preparing"  # marks a folder that `prepare` may write to; removed when the corpus is complete


@dataclass(frozen=True)
class Unit:
    """A share of the work, done by one process."""

    index: int
    pieces: tuple[Piece, ...]
    out: Path
    tokenizer: str
    tokenizer_fingerprint: str
    validation: float
    text_field: str
    max_document: int = MAX_DOCUMENT

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the shards. Shards with another fingerprint are made again."""
        content = {**asdict(self), "format": FORMAT}
        del content["out"], content["tokenizer"], content["max_document"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> Path:
        return self.out / f".unit-{self.index:05d}.json"


@dataclass(frozen=True)
class Record:
    """The result of a finished unit, stored next to its shards. A split without documents has no shard."""

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
    max_document: int = MAX_DOCUMENT,
    progress: Progress = _silent,
) -> Corpus:
    """Tokenize `sources` into the folder `out`. After an interruption, the same call finishes the corpus.

    A source is a text file (one document), a .jsonl or .jsonl.gz file (one object per line), a .parquet file, a folder
    of such files, hf:NAME[[:CONFIG]:SPLIT], or the word python or torch. The end id follows every document. The share
    `validation` of the documents, chosen by their content, becomes the validation split; if this leaves a split empty,
    the last tokens become the validation split instead. A document, or a line of JSON, that takes more than
    `max_document` bytes is an error, so memory stays bounded.
    """
    if not 0 <= validation < 1:
        raise UserError(
            f"validation={validation}: must lie in [0, 1)", fix="use 0.01 to hold out one document in a hundred"
        )
    if max_document < 1:
        raise UserError(
            f"max_document={max_document}: must be at least 1", fix=f"leave it out for the default, {MAX_DOCUMENT}"
        )
    if workers < 1:
        raise UserError(f"workers={workers}: must be at least 1", fix="give 1 for a single process")
    out, loaded = Path(out).absolute(), load_tokenizer(tokenizer)
    work = [
        Unit(i, pieces, out, loaded.name, loaded.fingerprint, validation, text_field, max_document)
        for i, pieces in enumerate(units(sources, text_field))
    ]
    source = f"{' '.join(sources)} [inputs {hashlib.sha256(''.join(u.fingerprint for u in work).encode()).hexdigest()}]"
    if (out / MANIFEST).exists():
        return _existing(out, source)
    with _claim(out):
        if (out / MANIFEST).exists():  # another process was faster
            return _existing(out, source)
        records = _process_all(work, workers, progress)
        splits = _splits(out, records, validation, dtype_for(loaded.vocabulary), sources)
        write_new(out / MANIFEST, _manifest(loaded, splits, source).to_json())
        corpus = load_corpus(out)
        corpus.verify()
        return _tidy(corpus)


def _existing(out: Path, source: str) -> Corpus:
    """A finished corpus is never overwritten: if it was made from other inputs, that is an error."""
    corpus = load_corpus(out)
    if corpus.manifest.source.rpartition(" [")[2] != source.rpartition(" [")[2]:
        raise UserError(
            f"{out} already contains a corpus made from other inputs: {corpus.manifest.source}",
            fix="choose another folder, or delete this one",
        )
    corpus.verify()
    return _tidy(corpus)


def _manifest(tokenizer: Tokenizer, splits: Splits, source: str) -> Manifest:
    vocabulary = Vocabulary(tokenizer.name, tokenizer.vocabulary, tokenizer.end, tokenizer.fingerprint)
    return Manifest(FORMAT, vocabulary, dtype_for(tokenizer.vocabulary), splits, source)


def _splits(out: Path, records: Sequence[Record], share: float, dtype: str, sources: Sequence[str]) -> Splits:
    train = tuple(record.train for record in records if record.train)
    validation = tuple(record.validation for record in records if record.validation)
    if not train and not validation:
        raise UserError(f"there are no documents in {', '.join(sources)}", fix="name files that contain text")
    if share and not (train and validation):
        return cut_tail(out, train or validation, share, dtype)
    return Splits(train, validation)


def _tidy(corpus: Corpus) -> Corpus:
    """Remove the files that only an unfinished corpus needs. The marker goes last: it permits removing the others."""
    if (corpus.folder / MARKER).exists():
        listed = {shard.file for split in ("train", "validation") for shard in corpus.shards(split)}
        for pattern in (".unit-*.json", ".*.part", "train-*.bin", "validation-*.bin", MARKER):
            for path in corpus.folder.glob(pattern):
                if path.name not in listed:
                    path.unlink(missing_ok=True)
    return corpus


@contextmanager
def _claim(out: Path) -> Iterator[None]:
    """Lock the folder, since two processes at once would write the same shards."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    if not (out / MARKER).exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty, and contains no corpus", fix="choose a new folder")
    with lock(out / MARKER) as held:
        if held is None:
            raise UserError(f"another process is preparing {out}", fix="wait for it, or choose another folder")
        yield


def _process_all(work: Sequence[Unit], workers: int, progress: Progress) -> list[Record]:
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
    """The record of a unit that was finished with the same inputs and whose shards are complete."""
    try:
        content = json.loads(read_bytes(unit.record))
        shards = {name: Shard(**content[name]) if content[name] else None for name in ("train", "validation")}
        record = Record(content["fingerprint"], **shards)
        complete = all(sha256_of(unit.out / s.file) == s.sha256 for s in record.shards)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if complete and record.fingerprint == unit.fingerprint else None


def _one_by_one(work: Sequence[Unit]) -> Results:
    for unit in work:
        yield unit.index, _process(unit)


def _process(unit: Unit) -> Record:
    """Write the shards of a unit. An old record is removed first and the new one written last, so none can be wrong."""
    tokenizer = _tokenizer(unit)
    dtype = dtype_for(tokenizer.vocabulary)
    train, validation = (ShardWriter(unit.out, split, unit.index, dtype) for split in ("train", "validation"))
    with writing(unit.record):
        unit.record.unlink(missing_ok=True)
    try:
        for piece in unit.pieces:
            for document in documents(
                piece, unit.text_field, in_parts=tokenizer.splits_at_newlines, max_document=unit.max_document
            ):
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
    return _load_once(unit.tokenizer, unit.tokenizer_fingerprint)


@lru_cache(maxsize=2)
def _load_once(name: str, fingerprint: str) -> Tokenizer:
    """Once per process. The fingerprint is part of the key, since a file may change and keep its name."""
    tokenizer = load_tokenizer(name)
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{name} changed while it was in use", fix="run the same command again")
    return tokenizer


def _pooled(work: Sequence[Unit], workers: int) -> Results:
    """Results in the order they finish. An executor notices a killed worker; a multiprocessing.Pool waits forever."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(min(workers, len(work)), mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        indices = {pool.submit(_process, unit): unit.index for unit in work}
        for future in as_completed(indices):
            yield indices[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps because memory ran out",
            fix="run the same command again, with fewer workers: finished parts are kept. "
            "In a script of yours, call prepare under `if __name__ == '__main__':`",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """One thread per process, no traceback on Ctrl-C, and an end when the parent ends."""
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
