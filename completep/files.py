"""The one place that reads and writes files: beside and renamed, and never over a result that is there."""

import os
import time
from pathlib import Path

from completep.errors import UserError


def write_new(path: Path, content: "str | bytes") -> Path:
    """Write a file that must not exist yet; a reader sees all of it or nothing."""
    data = content.encode() if isinstance(content, str) else content
    if path.exists():
        raise UserError(f"{path} exists already", fix="choose another name, or move the old file away")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())  # on the disk before it has its name, so that a power cut leaves all of it or nothing
        os.link(beside, path)  # fails, rather than replaces, if somebody else was faster
    except FileExistsError:
        raise UserError(f"{path} exists already", fix="choose another name, or move the old file away") from None
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", fix="choose a folder that you can write to, on a disk with space"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    return path


def fresh_folder(parent: Path, name: str) -> Path:
    """A folder of its own for this run's results: name-20260131-235959, with a counter if two start in one second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        folder = parent / f"{name}-{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"cannot create {folder}: {error.strerror}", fix="choose a folder that you can write to"
            ) from error
    raise UserError(f"no free folder name under {parent}", fix="move old results away")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix="check the name") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text: {error}", fix="check the name") from error
