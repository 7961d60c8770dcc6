"""A run's folder: which run it belongs to, who works in it, and whether its files are as they were written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from completep.config import BUILTIN, Run, plain, run_from_json, run_id, sealed, structure, unsealed
from completep.errors import UserError, some
from completep.files import lock, make_folder, read_text, sha256_of, write_new
from completep.train.checked import check_result
from completep.train.records import Result

RUN, RESULT, METRICS, CHECKPOINTS = "run.json", "result.json", "metrics.jsonl", "checkpoints"
WEIGHTS, CONFIG = "model.safetensors", "model.json"


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Lock the folder: two processes at once would write every step twice."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"the name {str(folder)!r} is not UTF-8", fix="choose another folder") from None
    make_folder(folder)
    with lock(folder / ".lock") as held:
        if held is None:
            raise UserError(
                f"another process is training in {folder}", fix="wait for it, stop it, or train in another folder"
            )
        yield


def read_run(path: Path) -> Run:
    """A run.json. A relative data folder is looked for beside the file, then where the command runs."""
    run = run_from_json(read_text(path), str(path))
    if run.data.source in ("", *BUILTIN):
        return run
    beside = path.parent / run.data.source
    return replace(run, data=replace(run.data, source=os.path.realpath(beside))) if beside.is_dir() else run


def claim(folder: Path, run: Run) -> None:
    """Write run.json into a new folder, or check that the folder belongs to this run."""
    path = folder / RUN
    if not path.exists():
        left = [name for name in (RESULT, METRICS, CHECKPOINTS, WEIGHTS) if (folder / name).exists()]
        if left:
            raise UserError(
                f"{folder} has {some(left)} but no {RUN}, so it is not known which run this is",
                fix=f"restore {path}, or train in another folder",
            )
        write_new(path, sealed(plain(portable(run, folder))))
        return
    try:
        old = read_run(path)
    except UserError as error:
        raise UserError(error.what, fix=f"restore {path}, or remove the folder {folder}") from error
    if run_id(old) != run_id(run):
        raise UserError(
            f"{folder} contains another run: {some(list(differences(old, run)), 8)}",
            fix="train in another folder, or use the old settings",
        )


def portable(run: Run, folder: Path) -> Run:
    """The run as its folder keeps it: prepared data is named relative to the folder, so that both can be moved."""
    if run.data.source in ("", *BUILTIN):
        return run
    relative = os.path.relpath(os.path.realpath(run.data.source), os.path.realpath(folder))
    return replace(run, data=replace(run.data, source=relative))


def differences(old: Run, new: Run) -> Iterator[str]:
    """The settings that differ, with both values."""

    def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(inner, f"{path}.{key}" if path else key)
        else:
            yield path, value

    changed = dict(flat(asdict(new)))
    for name, value in flat(asdict(old)):
        if changed.get(name) != value:
            yield f"{name} is {value} in the folder and {changed.get(name)} in this run"


def write_result(folder: Path, result: Result) -> None:
    write_new(folder / RESULT, sealed(asdict(result)))


def read_result(folder: Path) -> Result | None:
    """The result of a run that is done or diverged. Its files are checked by `check_files`."""
    path = folder / RESULT
    if path.is_symlink() and not path.exists():  # found out when the result is written, the whole run would be lost
        raise UserError(f"{path} is a link to a file that does not exist", fix=f"remove {path}")
    if not path.exists():
        return None
    again = f"delete {path}, and run the same command again"
    try:
        content = unsealed(read_text(path), or_plain=True)
        check_result(content)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}", fix=again) from error
    return structure(content, Result, str(path), again)


def check_files(folder: Path, result: Result, *names: str) -> None:
    """Compare files with the hashes that the result keeps of them. Results of older versions keep none."""
    for name in names or result.files:
        path = folder / name
        if name not in result.files or path.parent != folder:
            continue
        try:
            changed = sha256_of(path) != result.files[name]
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}", fix=_again(folder)) from error
        if changed:
            raise UserError(f"{path} is damaged: it has changed since the run ended", fix=_again(folder))


def _again(folder: Path) -> str:
    return f"restore it, or delete {folder / RESULT} and train the run again"


def finished(folder: Path, run: Run) -> Result | None:
    """The result, if the run is done or diverged and everything it left is undamaged."""
    result = read_result(folder)
    if result is None:
        return None
    claim(folder, run)
    if result.run and result.run != run_id(run):
        raise UserError(
            f"{folder / RESULT} belongs to another run than {folder / RUN}",
            fix="restore the file that was changed, or train in another folder",
        )
    check_files(folder, result)
    return result
