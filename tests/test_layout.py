"""How the source is laid out: data flows one way, exponents stand in one file, only the command line prints."""

import ast
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "completep"
FLOW = [
    *(
        "errors",
        "config",
        "units",
        "paper",
        "files",
        "load",
        "rules",
        "model",
        "compute",
        "data",
        "train",
        "measure",
        "integrations",
        "study",
    ),
    *("report", "cli", "__main__"),
]
FILES = sorted(PACKAGE.rglob("*.py"))


def layer(dotted: str) -> int:
    return FLOW.index(dotted.split(".")[1])


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("completep."):
            yield node.module
        elif isinstance(node, ast.ImportFrom) and node.module == "completep":
            yield from (f"completep.{n.name}" for n in node.names if n.name in FLOW)
        elif isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.startswith("completep."))


def test_imports_point_one_way():
    wrong = []
    for path in FILES:
        place = path.relative_to(PACKAGE).with_suffix("").parts
        if place[0] == "__init__":
            continue
        own = FLOW.index(place[0])
        wrong += [f"{path.name} imports {name}" for name in imports(path) if layer(name) > own]
    assert not wrong


def test_exponents_of_the_ratios_stand_in_the_table_alone():
    power = re.compile(r"(m_N|m_L|alpha|width_mult\w*|depth_mult\w*)\s*\*\*|Power\(\s*(width|depth)")
    hits = [p.name for p in FILES if power.search(p.read_text())]
    assert hits == ["table.py"]


def test_the_pattern_above_would_catch_one():
    assert re.search(r"(m_N|m_L)\s*\*\*", "lr = eta * m_N ** -1")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_is_light():
    heavy = "print([m for m in ('torch', 'polars', 'altair', 'rich', 'transformers') if m in sys.modules])"
    assert (
        run(f"import sys, completep; completep.COMPLETEP, completep.alpha(0.5), completep.Shape(1, 1); {heavy}") == "[]"
    )
    assert run(f"import sys, completep.cli; {heavy.replace(chr(39) + 'rich' + chr(39) + ', ', '')}") == "[]"


def test_parametrize_comes_when_asked_for():
    assert run("import completep; print(callable(completep.parametrize), callable(completep.audit))") == "True True"
