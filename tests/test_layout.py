"""How the source is laid out: imports point one way, exponents stand in one file, only the command line prints."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import completep
from tests.walks import calls_of, departures, steps

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "completep"
FILES = sorted(PACKAGE.rglob("*.py"))

# Every file may import from its own place and from those before it.
GROUND = ["errors", "config", "units", "files", "tuned", "stats", "paper", "load", "rules.table", "report"]
LIBRARY = ["anatomy", "rules", "model", "compute", "data", "train", "measure", "integrations", "sweep", "studies"]
LIBRARY += ["tuning"]
FLOW = [*GROUND, *LIBRARY, "cli", "__main__"]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


HOMES = {name: home.removeprefix("completep.") for home, names in completep._HOMES.items() for name in names}
MODULES = {dotted(path): path for path in FILES if path.parent != PACKAGE or path.name != "__init__.py"}


def place(module: str) -> int:
    """The position of a module in the flow, by the longest entry that it belongs to."""
    matches = [entry for entry in FLOW if module == entry or module.startswith(entry + ".")]
    assert matches, f"{module} has no place in the flow"
    return FLOW.index(max(matches, key=len))


def imports(source: str) -> set[str]:
    """The modules of the package that a file imports: at its top, in a function, or for type checking only."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("completep"):
            home = node.module.removeprefix("completep").removeprefix(".")
            names = {f"{home}.{n.name}".removeprefix(".") for n in node.names}
            if not home:
                names = {HOMES.get(name, name) for name in names}
            found |= {name for name in names if name in MODULES} or ({home} if home in MODULES else set())
        elif isinstance(node, ast.Import):
            found |= {n.name.removeprefix("completep.") for n in node.names if n.name.startswith("completep.")}
    return found


def against_the_flow(module: str, source: str) -> list[str]:
    return [f"{module} imports {name}" for name in imports(source) if place(name) > place(module)]


def test_imports_point_one_way():
    assert [wrong for module, path in MODULES.items() for wrong in against_the_flow(module, path.read_text())] == []


def test_an_import_against_the_flow_would_be_seen():
    lazy = "def f():\n    from completep.studies.run import study\n"
    assert against_the_flow("rules.fold", lazy) == ["rules.fold imports studies.run"]
    assert against_the_flow("anatomy.roles", "from completep.rules.scaling import Scaling")
    assert not against_the_flow("anatomy.roles", "from completep.rules.table import Role")
    through_the_root = "def f():\n    from completep import Shape, paper, study\n"
    assert against_the_flow("rules.fold", through_the_root) == ["rules.fold imports studies.run"]


OBJECT_IN_TEXT = re.compile(r"completep\.[a-z_.]+:[A-Za-z]")
# The model of the paper, by the name that a user gives; and an example in a help text.
MAY_NAME_OBJECTS = {"measure.check", "studies.coordinates", "cli.check", "cli.rules"}


def named_in_text(source: str) -> list[str]:
    """Objects of the package that are named in a string, as `module:object`: an import that no test would see."""
    strings = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [match.group() for text in strings for match in OBJECT_IN_TEXT.finditer(text)]


def test_no_import_is_hidden_in_a_string():
    hidden = {module for module, path in MODULES.items() if named_in_text(path.read_text())}
    assert hidden == MAY_NAME_OBJECTS
    assert named_in_text('KINDS = {"a": "completep.tuning.tasks:Command"}')
    assert not named_in_text('text = "completep.tuning.tasks: three classes"')


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_cycles_lazy_imports_included():
    assert cycle({module: imports(path.read_text()) - {module} for module, path in MODULES.items()}) == []


def test_a_cycle_would_be_seen():
    assert cycle({"a": {"b"}, "b": {"a"}})


POWER = re.compile(r"(m_N|m_L|alpha|width_mult\w*|depth_mult\w*)\s*\*\*|Power\(\s*(width|depth)")


def test_exponents_of_the_ratios_stand_in_the_table_alone():
    assert [p.name for p in FILES if POWER.search(p.read_text())] == ["table.py"]


@pytest.mark.parametrize("line", ["lr = eta * m_N ** -1", "x = m_L**-alpha", "Power(width=-1)", "Power( depth=a)"])
def test_an_exponent_elsewhere_would_be_seen(line):
    assert POWER.search(line)


@pytest.mark.slow
def test_only_the_command_line_prints():
    for path in FILES:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        printing = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not printing or path.parent.name == "cli", path


FROM_A_TEST_FILE = re.compile(
    r"^\s*(from\s+\S*\btest_\w+\s+import|from\s+\S+\s+import\s.*\btest_\w+|import\s+\S*\btest_\w+)", re.M
)


def test_no_test_imports_from_a_test_file():
    """Helpers stand in modules of their own. Also in the text of scripts that a test runs."""
    assert [str(p) for p in (ROOT / "tests").rglob("*.py") if FROM_A_TEST_FILE.search(p.read_text())] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("from tests.sweep.test_ray import HOW", True),
        ("    from .test_ray import HOW", True),
        ("from tests.sweep import tasks, test_ray", True),
        ("import tests.sweep.test_ray as ray", True),
        ("from tests.sweep.tasks import SELDOM", False),
        ("from torch.testing import assert_close", False),
    ],
)
def test_an_import_from_a_test_file_would_be_seen(line, wrong):
    assert bool(FROM_A_TEST_FILE.search(f"import os\n{line}\n")) == wrong


def test_every_package_opens_with_its_map():
    """Its `__init__` names every file beside it."""
    for init in PACKAGE.rglob("__init__.py"):
        if init.parent == PACKAGE:
            continue
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        missing = [p.name for p in init.parent.glob("*.py") if p != init and p.name not in text]
        assert missing == [], f"{init.parent.name}: {missing}"


def test_no_line_is_longer_than_120_characters():
    long = [
        f"{p.relative_to(ROOT)}:{i}"
        for folder in ("completep", "tests", "benchmarks", "examples", "docs")
        for p in (ROOT / folder).rglob("*")
        if p.suffix == ".py" or (folder == "completep" and p.suffix in (".c", ".html", ".js"))
        for i, line in enumerate(p.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []


def public_functions():
    """(name, definition) of what `import completep` offers, and of the methods of its classes."""
    for name in completep.__all__:
        thing = getattr(completep, name)
        module = getattr(thing, "__module__", "")
        if not module.startswith("completep"):
            continue
        tree = ast.parse(Path(sys.modules[module].__file__).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield name, node
            elif isinstance(node, ast.ClassDef) and node.name == name:
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
                yield from ((f"{name}.{m.name}", m) for m in methods)


def says_any(definition: ast.FunctionDef) -> bool:
    arguments = definition.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    notes = [ast.unparse(a.annotation) for a in every if a is not None and a.annotation is not None]
    return any(re.search(r"\bAny\b", note) for note in [*notes, ast.unparse(definition.returns or ast.Constant(None))])


def test_public_signatures_say_what_they_take():
    functions = dict(public_functions())
    assert {"parametrize", "check", "study", "Scaling.param_groups", "Check.document"} <= functions.keys()
    assert [name for name, definition in functions.items() if says_any(definition)] == []
    assert [
        name for name, definition in functions.items() if not ast.get_docstring(definition) and "." not in name
    ] == []


def test_any_in_a_signature_would_be_seen():
    assert says_any(ast.parse("def f(x: 'list[Any]') -> int: ...").body[0])
    assert not says_any(ast.parse("def f(x: object) -> int: ...").body[0])


@pytest.mark.parametrize(
    ("heading", "least"),
    [("From `completep study lr-transfer --search bracket` to its page", 20), ("From a model to optimizer groups", 12)],
)
def test_the_walks_in_contributing_are_true(heading, least):
    """Every function exists, and every file is passed once."""
    walk = steps(heading)
    assert len(walk) >= least
    assert len({file for file, _ in walk}) == len(walk)
    for file, function in walk:
        names = set()
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
                names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
            elif isinstance(node, ast.Assign):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        assert function in names, f"{file} has no {function}"


def five_lines() -> None:
    """README's, on its model."""
    import completep as cp
    from examples.own_model import MyModel

    scaling = cp.parametrize(MyModel(64, 4), base=lambda: MyModel(32, 2), rules=cp.alpha(1.0))
    scaling.init_(std=0.02, seed=0)
    scaling.param_groups(lr=2**-8, weight_decay=0.1, eps=1e-16)


def test_the_walk_of_parametrize_is_what_happens():
    walk, calls = steps("From a model to optimizer groups"), calls_of(five_lines)
    assert departures(walk, calls) == []
    (first, second, *rest) = walk
    assert departures([first, *rest], calls) == [f"{second[0]} is not in the walk"]
    assert departures([second, first, *rest], calls) == [f"{first[0]} comes before {second[0]}"]
    assert departures([*walk, ("rules/fold.py", "fold")], calls) == ["rules/fold.py:fold is not called"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_is_light():
    heavy = "print([m for m in ('torch', 'polars', 'altair', 'rich', 'scipy', 'transformers') if m in sys.modules])"
    use = "completep.COMPLETEP, completep.alpha(0.5), completep.Shape(1, 1)"
    assert run(f"import sys, completep; {use}; {heavy}") == "[]"
    assert run(f"import sys, completep.cli; {heavy.replace(chr(39) + 'rich' + chr(39) + ', ', '')}") == "[]"


@pytest.mark.slow
def test_public_names_come_when_they_are_used():
    assert run("import completep as cp; print(all(getattr(cp, n) is not None for n in cp.__all__))") == "True"
    assert run("import completep as cp; print(hasattr(cp, 'nothing'), callable(cp.study))") == "False True"
