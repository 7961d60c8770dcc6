"""Reading, writing and locking files. A new file appears complete or not at all, and nothing is overwritten."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from completep.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_new(path: Path, content: "str | bytes") -> Path:
    """Write a file that must not exist yet. A reader sees the whole file or no file."""
    data = content.encode() if isinstance(content, str) else content
    taken = UserError(f"{path} exists already", fix="choose another name, or move the old file away")
    if path.exists():
        raise taken
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before it gets its name, so that a power cut leaves a whole file or none
        os.link(part, path)  # unlike a rename, a link fails if another process was faster
    except FileExistsError:
        raise taken from None
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):  # a folder that is a file
            part.unlink(missing_ok=True)
    return path


def _unwritable(path: Path, error: OSError) -> UserError:
    fix = "choose a folder that you can write to, on a disk with space"
    return UserError(f"cannot write {path}: {error.strerror}", fix=fix)


def fresh_folder(parent: Path, name: str) -> Path:
    """A new folder like name-20260131-235959, with a counter if two are made in one second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        folder = parent / f"{name}-{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            what = f"cannot create {folder}: {error.strerror}"
            raise UserError(what, fix="choose a folder that you can write to") from error
    raise UserError(f"no free folder name under {parent}", fix="move old results away")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix="check the name") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: {error}", fix="check the name") from error


@contextmanager
def lock(path: Path) -> Iterator[int | None]:
    """Hold an exclusive lock on the file `path`, which is created if needed. Does not wait.

    Yields the descriptor, or None if another process holds the lock. The kernel releases the lock when the last process
    with the descriptor ends, however it ends. Where there is no fcntl, nothing is locked and the descriptor is yielded.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield descriptor if _flock(descriptor, exclusive=True) else None
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Does a process hold `lock(path)` now? False if the file does not exist, or if there is no fcntl."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, exclusive=False)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, *, exclusive: bool) -> bool:
    """Whether the lock could be taken."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
