"""The command line: parse, call, print. Every command is a thin skin over a Python function.

shared.py     argument types, console, printing, progress
board.py      the live view of a sweep
rules.py      explain, audit
check.py      check, check laziness, check transfer
derive.py     derive
plan.py       plan
train.py      prepare, train
tune.py       tune, tune status
worker.py     worker
study.py      study, study status, study pack and unpack, report, demo
evaluate.py   evaluate, export
"""

import errno
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

import tyro

from completep import __version__
from completep.cli.check import check, check_laziness, check_transfer
from completep.cli.derive import derive
from completep.cli.evaluate import evaluate, export
from completep.cli.plan import plan
from completep.cli.rules import audit, explain
from completep.cli.shared import console
from completep.cli.study import demo, report, study, study_pack, study_status, study_unpack
from completep.cli.train import prepare, train
from completep.cli.tune import tune, tune_status
from completep.cli.worker import worker
from completep.errors import UserError

INTERNAL = 70  # EX_SOFTWARE of sysexits.h
BROKEN_PIPE = 141  # what a shell reports of a program whose reader is gone
# What is wrong with a place that a user named, and not with us.
PLACES = {
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC,
    errno.ENOTDIR, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENXIO, errno.EINVAL,
    errno.EFBIG,
}  # fmt: skip

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "explain": explain,
    "audit": audit,
    "check": check,
    "derive": derive,
    "plan": plan,
    "tune": tune,
    "worker": worker,
    "prepare": prepare,
    "train": train,
    "study": study,
    "report": report,
    "evaluate": evaluate,
    "export": export,
}

# Commands of two words whose first word is a command too.
LONGER: dict[tuple[str, str], Callable[..., int]] = {
    ("check", "laziness"): check_laziness,
    ("check", "transfer"): check_transfer,
    ("study", "status"): study_status,
    ("study", "pack"): study_pack,
    ("study", "unpack"): study_unpack,
    ("tune", "status"): tune_status,
}


def main(words: list[str] | None = None) -> int:
    """Run one command. The exit code is 0, a verdict's 1 or 3, 2 for a mistake in the input, 70 for an error of ours,
    130 after Ctrl-C and 141 if nobody reads the output.
    """
    words = sys.argv[1:] if words is None else words
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _mistake(error.what, error.fix)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard(sys.stdout)
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in PLACES:
            return _bug()
        what = "a file" if error.filename is None else os.fsdecode(error.filename)
        return _mistake(f"cannot use {what}: {error.strerror}", "choose another place, or make this one usable")
    except MemoryError:
        return _mistake("there is not enough memory for this", "use a smaller model, batch or file")
    except (SystemExit, GeneratorExit):
        raise
    except RuntimeError as error:
        if "home directory" not in str(error):
            return _bug()
        # What pathlib raises to a library that wants a cache; in some containers the user is nobody known.
        return _mistake("HOME is not set, and this user has no home folder", "set HOME to a folder of yours")
    except BaseException:  # a panic of a compiled library is not an Exception
        return _bug()


def _run(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(f"completep {__version__}")
        return 0
    if tuple(words[:2]) in LONGER:
        return tyro.cli(LONGER[words[0], words[1]], prog=f"completep {words[0]} {words[1]}", args=words[2:])
    description = "Tune a transformer small, train it large: CompleteP, muP and SP for any PyTorch model."
    code: int = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="completep", description=description, args=words)
    return code


def _mistake(what: str, fix: str) -> int:
    from rich.text import Text

    _complain(Text("error:", "red"), what)
    _complain(Text("  fix:", "bold"), fix)
    return 2


def _bug() -> int:
    """An error that should not happen. Its traceback is kept in a file, and printed if COMPLETEP_DEBUG is set."""
    from rich.text import Text

    trace = traceback.format_exc()
    lines = [f"{trace.splitlines()[-1]}"]
    if os.environ.get("COMPLETEP_DEBUG"):
        lines.append(trace)
    else:
        with suppress(OSError):
            number, path = tempfile.mkstemp(prefix="completep-error-", suffix=".txt")
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"completep {__version__}, Python {sys.version}\n{trace}")
            lines.append(f"  traceback: {path}; COMPLETEP_DEBUG=1 prints it")
    lines.append("  This is a bug of completep. Please open an issue in the project's repository, with the traceback.")
    _complain(Text("internal error:", "red"), "\n".join(lines))
    return INTERNAL


def _open_streams() -> None:
    """Open what the caller has closed, as in `completep … >&-`.

    Otherwise the next file that is opened would get the stream's number, and with it all that a library or a child
    process prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def _complain(*words: object) -> None:
    """Print to stderr. If it is full or nobody reads it, the exit code still says what is wrong."""
    try:
        console(stderr=True).print(*words)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: Python flushes it at its end, and would exit with a code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
