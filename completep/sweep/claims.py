"""Who works on a task: a kernel lock, or on a network file system a claim with a heartbeat.

The kernel releases a lock when its process ends, however it ends. But NFS, Lustre and similar file systems may not
share locks between machines. There a claim is a file that its owner changes every few seconds. A claim that has not
changed for a while is taken over. The process that waits measures this time by its own clock, and ignores the times of
files, so the clocks of the machines need not agree.
"""

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from completep.errors import UserError
from completep.files import SAFELY, is_locked, lock, read_bytes, write_new

Kind = Literal["kernel", "heartbeat"]
LONGEST = 3600  # seconds of a heartbeat


def heartbeat() -> float:
    """Seconds between two changes of a claim. It must be the same for all processes."""
    text = os.environ.get("COMPLETEP_HEARTBEAT", "5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < LONGEST:
        what = f"COMPLETEP_HEARTBEAT is {text!r}, not a number of seconds between 0 and {LONGEST}"
        raise UserError(what, fix="unset COMPLETEP_HEARTBEAT, or set it to 5")
    return seconds


BEAT = heartbeat()
STALE = 12 * BEAT  # seconds without a change after which a claim is taken over
LOOK = 0.1  # seconds between two looks at somebody else's claim
NETWORK = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "afs",
    "fuse",
    "9p",
    "glusterfs",
    "orangefs",
    "pvfs",
)
MOUNTS = Path("/proc/self/mounts")


def claims_for(root: Path) -> Kind:
    """The kind of claim that the file system of a folder supports."""
    kind = file_system(root)
    return "heartbeat" if kind.startswith(NETWORK) else "kernel"


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system of a path, by the nearest mount point; empty if it is unknown."""
    try:
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    place = Path(os.path.realpath(path))  # Path.resolve raises on a loop of links
    points = {Path(words[1].replace("\\040", " ")): words[2] for words in lines if len(words) > 2}
    return next((points[p] for p in (place, *place.parents) if p in points), "")


@contextmanager
def claim(place: Path, kind: Kind) -> Iterator[int | None]:
    """Claim the task of `place`. Yields a descriptor, or None if another process has the claim."""
    if kind == "kernel":
        with lock(place.with_suffix(".lock")) as descriptor:
            yield descriptor
        return
    with beating(place.with_suffix(".claim")) as descriptor:
        yield descriptor


def is_claimed(place: Path, kind: Kind) -> bool:
    """Does a process work on this task? A claim whose owner has died counts until it is taken over."""
    return is_locked(place.with_suffix(".lock")) if kind == "kernel" else place.with_suffix(".claim").exists()


@contextmanager
def beating(path: Path) -> Iterator[int | None]:
    claimed = Claim(path)
    while not claimed.take():
        if not taken_over(path):
            yield None
            return
    try:
        claimed.start()
        yield claimed.descriptor
    finally:
        claimed.release()


@dataclass
class Claim:
    """A claim of this process. Losing it (this machine slept, or lost the file system) stops the process."""

    path: Path
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    descriptor: int = -1
    over: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def take(self) -> bool:
        """Create the file, unless there is one. A link is atomic on NFS too, and never overwrites."""
        try:
            write_new(self.path, self.content(0))
        except UserError:
            if self.path.exists():
                return False
            raise
        self.descriptor = os.open(self.path, os.O_RDWR | SAFELY)
        return True

    def content(self, beat: int) -> str:
        return json.dumps({"owner": self.name, "host": os.uname().nodename, "pid": os.getpid(), "beat": f"{beat:012d}"})

    def start(self) -> None:
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        """Write through the descriptor, not to the path: a claim that was taken over must not come back."""
        beat = 0
        while not self.over.wait(BEAT):
            beat += 1
            with suppress(OSError):
                os.pwrite(self.descriptor, self.content(beat).encode(), 0)
                os.fsync(self.descriptor)
            if not self.mine():
                os.kill(os.getpid(), signal.SIGTERM)  # the task saves and stops; another process has it now
                return

    def mine(self) -> bool:
        try:
            return os.stat(self.path).st_ino == os.fstat(self.descriptor).st_ino
        except FileNotFoundError:
            return False
        except OSError:  # the file system does not answer: nobody else can take the claim either
            return True

    def release(self) -> None:
        """Stop the heartbeat first: it takes a removed file for a lost claim, and a closed descriptor may be reused."""
        self.over.set()
        if self.thread is not None:
            self.thread.join()
        if self.descriptor < 0:
            return
        if self.mine():
            with suppress(OSError):
                self.path.unlink()
        os.close(self.descriptor)


def taken_over(path: Path) -> bool:
    """Wait until a claim changes (False), or until it is gone or was stale and is removed (True)."""
    first, began = seen(path), time.monotonic()
    while first is not None:
        time.sleep(LOOK)
        now = seen(path)
        if now != first:
            return now is None
        if time.monotonic() - began >= STALE:
            return remove_stale(path, first)
    return True


def seen(path: Path) -> bytes | None:
    """The content of a claim; None if there is none."""
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_file():  # it cannot be read now, which counts as no change
            return b""
        raise UserError(f"{path} is not a claim: {error.strerror}", fix=f"remove {path}") from error


def remove_stale(path: Path, content: bytes) -> bool:
    """Remove a stale claim: a rename succeeds for one process only. A fresh claim that it caught is put back."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    if seen(aside) == content:
        aside.unlink()
        return True
    with suppress(FileExistsError):
        os.link(aside, path)
    aside.unlink()
    return False
