"""Reading, writing and locking files. A new file appears complete or not at all, and nothing is overwritten.

Folders may come from somebody else, so nothing here follows a symbolic link at the name it writes to, and nothing
reads what is not a regular file: a named pipe would make the reader wait, and a device has no end.
"""

import errno
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO

from completep.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Windows does not have these flags. With O_NONBLOCK, opening a named pipe does not wait for its other end.
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
SAFELY = getattr(os, "O_NOFOLLOW", 0) | NO_WAIT
SMALL = 2**26  # largest size in bytes of a file of settings or results


def write_new(path: Path, content: "str | bytes") -> Path:
    """Write a file that must not exist yet. A reader sees the whole file or no file."""
    taken = UserError(f"{path} exists already", fix="choose another name, or move the old file away")
    if path.exists():
        raise taken
    try:
        with _written_beside(path, content) as part:
            os.link(part, path)  # unlike a rename, a link fails if another process was faster
    except FileExistsError:
        raise taken from None
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def write_over(path: Path, content: "str | bytes") -> Path:
    """Write a file of ours that may exist. A reader sees the whole old file or the whole new one."""
    try:
        with _written_beside(path, content) as part:
            os.replace(part, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


@contextmanager
def _written_beside(path: Path, content: "str | bytes") -> Iterator[Path]:
    # A report may contain a file name that is not UTF-8.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    part = path.with_name(f".{path.name}.{threading.get_native_id()}.part")  # threads of one process write too
    make_folder(path.parent)
    try:
        with create(part) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before it gets its name, so that a power cut leaves a whole file or none
        yield part
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless it exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{path} is a file, not a folder", fix="choose another folder") from None
    except (OSError, ValueError) as error:
        what = f"cannot create the folder {path}: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, fix="choose a folder that you can write to, on a disk with space") from error


def cache_folder() -> Path:
    """The folder for files that completep can make again."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "completep"
    except RuntimeError:  # a user without a home, as in some containers
        what = "there is no place for a cache: HOME is not set, and this user has no home folder"
        raise UserError(what, fix="set XDG_CACHE_HOME to a folder that you can write to") from None


def create(part: Path, buffering: int = -1) -> IO[bytes]:
    """Open a new temporary file for writing. A file or link that a killed process left there is removed first."""
    part.unlink(missing_ok=True)
    return os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, 0o666), "wb", buffering)


def append(path: Path) -> int:
    """A descriptor that appends to a file, which is created if needed. A symbolic link is an OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | SAFELY, 0o666)


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
            if not parent.is_dir():
                raise UserError(f"{parent} is a file, not a folder", fix="choose another folder") from None
        except OSError as error:
            what = f"cannot create {folder}: {error.strerror}"
            raise UserError(what, fix="choose a folder that you can write to") from error
    raise UserError(f"{parent} has too many folders like {name}-{stamp}", fix="run the same again")


def remove_folder(path: Path) -> None:
    """Remove a folder of ours, if it is there. A symbolic link itself is removed, never what it leads to."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def open_regular(path: "Path | str", *, follow: bool = True) -> BufferedReader:
    """Open a file for reading. Anything but a regular file is an OSError, without waiting; so is a link, if not
    `follow`.
    """
    descriptor = os.open(path, os.O_RDONLY | (NO_WAIT if follow else SAFELY))
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_bytes(path: "Path | str", most: int = SMALL, *, follow: bool = True) -> bytes:
    """The content of a regular file. A file of more than `most` bytes is an OSError; so is a link, if not `follow`."""
    with open_regular(path, follow=follow) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        return file.read()


def read_text(path: Path, most: int = SMALL) -> str:
    try:
        return read_bytes(path, most).decode()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix="check the name") from error
    except ValueError as error:  # not UTF-8, or a NUL byte in the name
        raise UserError(f"{path} is not text: {error}", fix="check the name") from error


def last_lines(path: Path, count: int = 8) -> str:
    """The last lines of a log that are not blank; nothing if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - 2**16))  # a log may be long
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-count:])


def sha256_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[int | None]:
    """Hold an exclusive lock on the file `path`. It is created if needed; a symbolic link is refused.

    Yields the descriptor, or None if another process holds the lock and `wait` is false. The kernel releases the lock
    when the last process with the descriptor ends, however it ends. Where there is no fcntl, nothing is locked and the
    descriptor is yielded.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFELY, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield descriptor if _flock(descriptor, exclusive=True, wait=wait) else None
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Does a process hold `lock(path)` now? False if there is no such file, or no fcntl."""
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFELY)
    except OSError:
        return False
    try:
        return not _flock(descriptor, exclusive=False)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, *, exclusive: bool, wait: bool = False) -> bool:
    """Take a lock. Returns False if another process has it."""
    if fcntl is None:
        return True
    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
