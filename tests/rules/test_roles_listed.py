"""Roles are listed in the table and named by the finder. Everything else selects them by their traits."""

import ast
from pathlib import Path

import completep

PACKAGE = Path(completep.__file__).parent
MAY_LIST = {"rules/table.py", "anatomy/roles.py"}


def lists_roles(source: str) -> list[int]:
    """The lines of expressions that name more than two roles."""

    def roles(node):
        return {
            n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "Role"
        }

    if source.count("Role.") < 3:
        return []
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr) and len(roles(node)) > 2]


def test_only_the_table_and_the_finder_list_roles():
    wrong = {
        name: lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := path.relative_to(PACKAGE).as_posix()) not in MAY_LIST and (lines := lists_roles(path.read_text()))
    }
    assert not wrong


def test_a_list_would_be_found():
    assert lists_roles("inside = (Role.HIDDEN, Role.HIDDEN_BIAS, Role.BLOCK_NORM)") == [1]
    assert set(lists_roles("x = 1\nif r in {Role.HIDDEN, Role.QK_NORM, Role.EMBEDDING}: pass")) == {2}
    assert lists_roles("hidden = role is Role.HIDDEN") == []
    assert lists_roles((PACKAGE / "rules/table.py").read_text())
