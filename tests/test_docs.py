"""Every command and every piece of Python in the README and the docs is run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from completep.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


COMMANDS = [
    line.split("#")[0].strip() for page in PAGES for block in blocks(page, "console") for line in block.splitlines()
]
EXAMPLE = re.findall(r"^ *(completep .*|python .*)$", (ROOT / "examples" / "own_model.py").read_text(), re.M)


def test_there_is_something_to_check():
    assert {c.split()[0] for c in COMMANDS} == {"make", "completep"}
    assert len(EXAMPLE) == 3


@pytest.mark.parametrize("page", [*PAGES, ROOT / "examples" / "own_model.py"], ids=lambda p: p.name)
def test_commands_run(page, monkeypatch, capsys, tmp_path):
    """Each page's commands in their order, in an empty folder with the examples beside."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    lines = EXAMPLE if page.suffix == ".py" else [x for block in blocks(page, "console") for x in block.splitlines()]
    before = (
        {line for other in PAGES[: PAGES.index(page)] for b in blocks(other, "console") for line in b.splitlines()}
        if page in PAGES
        else {}
    )
    for command in [line.split("#")[0].strip() for line in lines if line.startswith("completep")]:
        if command.startswith("completep check") and command in before:
            continue  # half a minute for what an earlier page has shown, and nothing follows from it
        assert main(shlex.split(command)[1:]) == 0, command
        assert capsys.readouterr().out


def rules_table(page):
    return re.search(r"\| role \| init std .*?\n\n", page.read_text(), re.S)[0].strip()


def test_the_table_of_rules_is_what_the_code_computes():
    """Each cell as a formula, at numbers where no two exponents agree."""
    from completep.rules.table import Role, alpha

    assert rules_table(ROOT / "README.md") == rules_table(ROOT / "docs" / "rules.md")
    m_N, m_L, a = 3.0, 5.0, 0.75
    signs = {"·": "*", "^": "**", "⁻¹": "**-1", "α": "a", "σ": "1", "η": "1", "λ": "1", "ε": "1"}
    seen = set()
    for line in rules_table(ROOT / "README.md").splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for role in (Role(word) for word in re.sub(r" \(.*\)", "", name).split(", ")):
            rule = alpha(a).rule(role)
            seen.add(role)
            for cell, power in zip(cells, (rule.init_std, rule.lr, rule.weight_decay, rule.eps), strict=True):
                if re.search("[σηλε]", cell):
                    for sign, word in signs.items():
                        cell = cell.replace(sign, word)
                    assert eval(cell, {"m_N": m_N, "m_L": m_L, "a": a}) == pytest.approx(power(m_N, m_L)), (name, cell)
    assert seen == set(Role) - {Role.EMBEDDING_BIAS}  # which the page has in words


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = {w for page in PAGES for w in re.findall(r"\bmake ([a-z]+)", page.read_text().replace("and make;", ""))}
    assert {"demo", "test"} <= used <= targets


def test_the_example_runs(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    from examples import own_model

    own_model.main()
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 0.5


PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PYTHON, ids=lambda p: p.name)
def test_python_runs(page, monkeypatch):
    """A page's pieces in their order, after the README's first, with small sizes; each page may use `model`, `scaling`, `optimizer`."""
    monkeypatch.syspath_prepend(str(ROOT))
    scope: dict = {}
    first, *rest = blocks(ROOT / "README.md", "python")
    exec(first.replace("width=1024, depth=48", "width=128, depth=4").replace("width=256", "width=64"), scope)
    scope["model"](__import__("torch").arange(16)[None]).logsumexp(-1).sum().backward()
    for block in rest if page.name == "README.md" else blocks(page, "python"):
        exec(block, scope)
    if page.name == "README.md":
        assert scope["scaling"].style == "folded"


def test_python_that_is_checked():
    assert {page.name for page in PYTHON} >= {"README.md", "index.md", "rules.md"}


def test_links_inside_the_project_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_page_of_numbers_is_what_the_code_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import paper_numbers

    page = (ROOT / "docs" / "paper-numbers.md").read_text()
    assert page == paper_numbers.page()
    assert "printed " not in page.split("## The size table")[1].split("## Savings")[0].split("\n\n", 2)[2]


def test_the_depth_figure_is_what_its_numbers_say():
    """Deeper is better at one learning rate, in the run that the docs report; and the chart takes such a frame."""
    import polars as pl

    from completep.report.figures import depth_chart, render

    frame = pl.read_csv(ROOT / "docs" / "results" / "depth.csv")
    last = frame.filter(pl.col("kind") == "eval").group_by("depth").agg(pl.col("loss").last()).sort("depth")
    assert last["depth"].to_list() == [2, 8, 32]
    assert last["loss"].is_sorted(descending=True)
    for depth, loss in last.iter_rows():
        assert re.search(rf"\| {depth} \| \**{loss:.3f}", (ROOT / "docs" / "train.md").read_text())
    assert b"deeper is better" in render(depth_chart(frame), "svg")


def test_the_site_builds_without_a_broken_link(tmp_path, monkeypatch):
    """Strict: a link or a name of the API that leads nowhere stops it."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {p.relative_to(tmp_path / "site").as_posix() for p in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "rules.html", "api.html", "faq.html", "comparison.html", "results/index.html"} <= pages
    assert "parametrize" in (tmp_path / "site" / "api.html").read_text()
