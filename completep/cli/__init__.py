"""The command line: parse, call, print. Every command is a thin skin over a Python function.

shared.py     argument types, console, printing, progress
board.py      the live view of a sweep
rules.py      explain, audit
check.py      check, check laziness, check transfer
plan.py       plan
train.py      prepare, train
study.py      study, study status, report, demo
evaluate.py   evaluate, export
"""

import sys
from collections.abc import Callable

import tyro

from completep import __version__
from completep.cli.check import check, check_laziness, check_transfer
from completep.cli.evaluate import evaluate, export
from completep.cli.plan import plan
from completep.cli.rules import audit, explain
from completep.cli.shared import console
from completep.cli.study import demo, report, study, study_status
from completep.cli.train import prepare, train
from completep.errors import UserError

COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "explain": explain,
    "audit": audit,
    "check": check,
    "plan": plan,
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
}


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words in (["--version"], ["-V"]):
        print(f"completep {__version__}")
        return 0
    try:
        description = "Tune a transformer small, train it large: CompleteP, muP and SP for any PyTorch model."
        if tuple(words[:2]) in LONGER:
            return tyro.cli(LONGER[words[0], words[1]], prog=f"completep {words[0]} {words[1]}", args=words[2:])
        code: int = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="completep", description=description, args=words
        )
        return code
    except UserError as error:
        from rich.markup import escape

        console(stderr=True).print(f"[red]error:[/] {escape(error.what)}\n  [bold]fix:[/] {escape(error.fix)}")
        return 2
    except KeyboardInterrupt:
        return 130
