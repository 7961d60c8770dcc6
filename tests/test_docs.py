"""Every command and every Python block in the README and the docs is run."""

import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import completep
from completep.cli import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
OWN_MODEL = ROOT / "examples" / "own_model.py"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands(page):
    """The commands of a page in their order, without comments."""
    if page == OWN_MODEL:
        return re.findall(r"^ *(completep .*|python .*)$", page.read_text(), re.M)
    lines = (line for block in blocks(page, "console") for line in block.splitlines())
    return [line.split("#")[0].strip() for line in lines]


def params(pages, slow):
    """Pages as parameters of a test; those that take long are marked."""
    return [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.name in slow else []) for p in pages]


WITH_COMMANDS = [page for page in [*PAGES, OWN_MODEL] if any(c.startswith("completep") for c in commands(page))]
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


def test_there_is_something_to_check():
    assert {command.split()[0] for page in PAGES for command in commands(page)} == {"make", "completep"}
    assert len(commands(OWN_MODEL)) == 3
    assert {page.name for page in WITH_PYTHON} >= {"README.md", "index.md", "rules.md", "check.md", "plan.md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", params(WITH_COMMANDS, {"README.md", "check.md", "studies.md", "train.md", "evaluate.md"})
)
def test_commands_run(page, monkeypatch, capsys, tmp_path):
    """The commands of a page in their order, in an empty folder next to the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    earlier = {command for other in WITH_COMMANDS[: WITH_COMMANDS.index(page)] for command in commands(other)}
    for command in commands(page):
        if not command.startswith("completep") or (command.startswith("completep check") and command in earlier):
            continue  # a check takes half a minute, and later commands do not depend on it
        assert main(shlex.split(command)[1:]) == 0, command
        assert capsys.readouterr().out


def rules_table(page):
    return re.search(r"\| role \| init std .*?\n\n", page.read_text(), re.S)[0].strip()


def test_the_table_of_rules_is_what_the_code_computes():
    """Each cell is evaluated as a formula, at numbers where no two exponents agree."""
    from completep.rules.table import Role, alpha

    assert rules_table(README) == rules_table(ROOT / "docs" / "rules.md")
    m_N, m_L, m_E, a = 3.0, 5.0, 7.0, 0.75
    fan_out = {Role.EXPERT: m_N * m_E, Role.ROUTER: m_E}  # m_N elsewhere
    signs = {"·": "*", "^": "**", "⁻¹": "**-1", "α": "a", "σ": "1", "η": "1", "λ": "1", "ε": "1"}
    seen = set()
    for line in rules_table(README).splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for role in (Role(word) for word in re.sub(r" \(.*\)", "", name).split(", ")):
            rule = alpha(a).rule(role)
            seen.add(role)
            for cell, power in zip(cells, (rule.init_std, rule.lr, rule.weight_decay, rule.eps), strict=True):
                if re.search("[σηλε]", cell):
                    for sign, word in signs.items():
                        cell = cell.replace(sign, word)
                    value = eval(cell, {"m_N": m_N, "m_L": m_L, "m_E": m_E, "a": a})
                    assert value == pytest.approx(power(m_N, m_L, fan_out.get(role))), (name, cell)
    assert seen == set(Role)


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = {target for page in PAGES for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.M)}
    assert {"demo", "test", "check"} <= used <= targets


@pytest.mark.slow
def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    from examples import own_model

    own_model.main()
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("page", params(WITH_PYTHON, {"check.md", "derive.md", "train.md"}))
def test_python_runs(page, monkeypatch, tmp_path):
    """The Python blocks of a page in their order, after the first block of the README with small sizes.

    So each page may use `cp`, `MyModel`, `model`, `scaling` and `optimizer`.
    """
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    first, *rest = blocks(README, "python")
    exec(first.replace("width=1024, depth=48", "width=128, depth=4").replace("width=256", "width=64"), scope)
    scope["model"](torch.arange(16)[None]).logsumexp(-1).sum().backward()
    for block in rest if page == README else blocks(page, "python"):
        exec(block.replace("depths=[2, 4, 8, 16]", "depths=[2, 4, 8]"), scope)
    if page == README:
        assert scope["scaling"].style == "folded"
    if page.name == "check.md":
        assert scope["check"].verdict == scope["transfer"].verdict == "PASS"
        assert scope["page"].name == "report.html"
        assert {"report.md", "depth-tensors.svg", "width-tensors.svg", "tensors.csv"} <= {
            p.name for p in scope["others"]
        }


def test_links_inside_the_project_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_what_the_docs_name_exists():
    """Modules, functions and files, by their full names."""
    for page in PAGES:
        for name in set(re.findall(r"\bcompletep(?:\.[A-Za-z_]+)+", page.read_text())):
            pkgutil.resolve_name(name)  # raises if there is no such thing
        for path in re.findall(r"`((?:completep|tests|benchmarks|examples|docs)/[\w/]+\.py)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_page_of_numbers_is_what_the_code_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import paper_numbers

    page = (ROOT / "docs" / "paper-numbers.md").read_text()
    assert page == paper_numbers.page()
    assert "printed " not in page.split("## The size table")[1].split("## Savings")[0].split("\n\n", 2)[2]


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path, monkeypatch):
    """Strict: a link or a name of the API that leads nowhere is an error."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {p.relative_to(tmp_path / "site").as_posix() for p in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "rules.html", "api.html", "faq.html", "comparison.html", "results/index.html"} <= pages
    api = (tmp_path / "site" / "api.html").read_text()
    documented = {name for name in completep.__all__ if not name.isupper()}
    assert {name for name in documented if not re.search(rf'id="[\w.]+\.{name}"', api)} == set()
