"""The command line: parse, call, print. Every command is a thin skin over a Python function.

parsing.py    words → the call of a command, and its help
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

import difflib
import errno
import io
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import TextIO

from completep import __version__
from completep.cli.check import check, check_laziness, check_transfer
from completep.cli.derive import derive
from completep.cli.evaluate import evaluate, export
from completep.cli.parsing import Command, paragraphs, run_command
from completep.cli.plan import plan
from completep.cli.rules import audit, explain
from completep.cli.shared import console
from completep.cli.study import demo, report, study, study_pack, study_status, study_unpack
from completep.cli.train import prepare, train
from completep.cli.tune import tune, tune_status
from completep.cli.worker import worker
from completep.errors import UserError, shortened

INTERNAL = 70  # EX_SOFTWARE of sysexits.h
BROKEN_PIPE = 141  # what a shell reports of a program whose reader is gone
# Errors of a file or folder that the user named, not bugs.
PLACES = {
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC,
    errno.ENOTDIR, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENXIO, errno.EINVAL,
    errno.EFBIG,
}  # fmt: skip

# In the order of the overview. A command of two words stands after the one that it starts with.
COMMANDS: dict[str, Command] = {
    "demo": demo,
    "explain": explain,
    "audit": audit,
    "check": check,
    "check laziness": check_laziness,
    "check transfer": check_transfer,
    "derive": derive,
    "plan": plan,
    "tune": tune,
    "tune status": tune_status,
    "worker": worker,
    "prepare": prepare,
    "train": train,
    "study": study,
    "study status": study_status,
    "study pack": study_pack,
    "study unpack": study_unpack,
    "report": report,
    "evaluate": evaluate,
    "export": export,
}
DESCRIPTION = "Tune a transformer small, train it large: CompleteP, muP and SP for any PyTorch model."


def main(words: list[str] | None = None) -> int:
    """Run one command, and return its exit code (docs/security.md lists them)."""
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
    except UnicodeEncodeError as error:
        return _mistake(f"{error.object!r} cannot be written as {error.encoding}", "use other characters")
    except MemoryError:
        return _mistake("there is not enough memory for this", "use a smaller model, batch or file")
    except (SystemExit, GeneratorExit):
        raise
    except RuntimeError as error:
        if "home directory" not in str(error):
            return _bug()
        # pathlib raises this where a library looks for its cache and the user of a container has no home.
        return _mistake("HOME is not set, and this user has no home folder", "set HOME to a folder of yours")
    except BaseException:  # a panic of a compiled library is not an Exception
        return _bug()


def _run(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(f"completep {__version__}")
        return 0
    for count in (2, 1):
        if (name := " ".join(words[:count])) in COMMANDS:
            return run_command(COMMANDS[name], name, words[count:])
    if words and words[0] not in ("-h", "--help"):
        close = difflib.get_close_matches(words[0][:80], COMMANDS, 1)
        fix = f"did you mean completep {close[0]}?" if close else "`completep --help` lists the commands"
        raise UserError(f"completep has no command {words[0]!r}", fix=fix)
    _show_overview()
    return 0 if words else 2


def _show_overview() -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, command in COMMANDS.items():
        table.add_row(f"  {name}", paragraphs(command)[0])
    terminal = console()
    terminal.print(f"usage: completep COMMAND [OPTIONS]\n\n{DESCRIPTION}\n")
    terminal.print(table)
    terminal.print("\n`completep COMMAND --help` shows the options of a command and an example.")


def _mistake(what: str, fix: str) -> int:
    from rich.text import Text

    _complain(Text("error:", "red"), shortened(what))
    _complain(Text("  fix:", "bold"), shortened(fix))
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
    """Open the standard streams that the caller has closed, as in `completep … >&-`.

    Otherwise the next file that is opened gets the number of the stream, and everything that a library or a child
    process prints goes into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def _complain(*words: object) -> None:
    """Print to stderr. If that fails, the exit code still says what is wrong."""
    try:
        console(stderr=True).print(*words)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Discard what is still buffered. Otherwise Python fails to flush it at exit, and sets its own exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
