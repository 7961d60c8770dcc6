"""CONTRIBUTING's recipes are true: what they name is enough."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from completep import COMPLETEP, Role, audit, parametrize
from completep.model.gpt import gpt
from completep.rules import table
from completep.rules.table import Column, OptimizerKind
from tests.rules.models import clean

PACKAGE = Path(__file__).parent.parent / "completep"


def model(width=32, depth=2):
    return gpt(width, depth, 61, head_size=16)


class Sloppy(torch.optim.Optimizer):
    """Sign descent with momentum, under a name that the table does not know."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * momentum.sign())


def train(body, scaling, optimizer, steps=3):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(61, (2, 9), generator=generator)
        optimizer.zero_grad()
        body(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    return body(tokens[:, :-1], tokens[:, 1:]).item()


@pytest.mark.slow
def test_a_new_optimizer_is_one_entry(monkeypatch):
    body = model(64, 4)
    scaling = parametrize(body, base=model).init_(0.02)
    with pytest.raises(ValueError, match="no rule for the optimizer 'Sloppy'"):
        scaling.param_groups(1e-3, optimizer=Sloppy)
    entry = OptimizerKind(Column.ADAM, state={"momentum_buffer": 1})
    monkeypatch.setattr(table, "OPTIMIZERS", {**table.OPTIMIZERS, "sloppy": entry})
    optimizer = Sloppy(scaling.param_groups(1e-3, weight_decay=0.1, optimizer=Sloppy))
    rates = {role: group["lr"] for group in optimizer.param_groups for role in group["roles"]}
    assert rates["hidden weight"] == pytest.approx(1e-3 / 2)
    assert clean(audit(body, optimizer, base=model, check_init=False))
    train(body, scaling, optimizer)
    scaling.fold(optimizer)  # weights, rates and momentum move together
    folded = train(body, scaling, optimizer)
    twin = model(64, 4)
    again = parametrize(twin, base=model).init_(0.02)
    other = Sloppy(again.param_groups(1e-3, weight_decay=0.1, optimizer=Sloppy))
    train(twin, again, other)
    assert train(twin, again, other) == pytest.approx(folded, rel=1e-4)


def named_roles(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    return {n.attr for n in attributes if n.value.id == "Role" and n.attr in Role.__members__}


@pytest.mark.slow
def test_a_new_role_is_two_files():
    """Only the table and the finder name roles; others ask for traits, but for the few that one place is about."""
    few = {
        "anatomy/examine.py": {"EMBEDDING"},  # a readout with this role is tied
        "rules/audit.py": {"EMBEDDING"},  # where the base values are read from
        "measure/linearization.py": {"HIDDEN"},  # a network of hidden matrices only
    }
    naming = {str(p.relative_to(PACKAGE)): named_roles(p) for p in PACKAGE.rglob("*.py")}
    others = {f: roles for f, roles in naming.items() if roles and f not in ("rules/table.py", "anatomy/roles.py")}
    assert {f: roles - few.get(f, set()) for f, roles in others.items() if roles - few.get(f, set())} == {}


ROLE = {  # what the recipe says: a member, its trait, its row, and where it is found
    "rules/table.py": (
        ('    BLOCK_VECTOR = "block vector"', '    SWITCH = "switch"\n'),
        ("    Role.BLOCK_VECTOR: Trait(", '    Role.SWITCH: Trait("vector", inside=True, bare=True),\n'),
        ("        Role.BLOCK_VECTOR: Rule(", '        Role.SWITCH: Rule(lr=Power(depth=-3), source="a test"),\n'),
    ),
    "anatomy/roles.py": (
        (
            "        return Part(Role.BLOCK_VECTOR, kept=True) if",
            '        if part is None and name.endswith("switch"):\n            return Part(Role.SWITCH, kept=True)\n',
        ),
    ),
}
USE = """
import torch
from torch import nn
import completep as cp

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.switch = nn.Parameter(torch.full((4 * width,), 0.5))

    def forward(self, x):
        return x + self.down(self.switch * torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(61, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 61, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

base = lambda: Model(32, 2)
model = Model(64, 8)
scaling = cp.parametrize(model, base=base).init_(0.1)
assert (model.blocks[3].switch == 0.5).all()
optimizer = torch.optim.AdamW(scaling.param_groups(1.0, weight_decay=0.1, eps=1e-16))
group = next(g for g in optimizer.param_groups if "switch" in g["roles"])
assert (group["lr"], group["weight_decay"]) == (4.0**-3, 0.0), group
rows = {row.name: row for row in scaling.explain().rows}
assert (rows["blocks.3.switch"].role, rows["blocks.3.switch"].source) == ("switch", "a test")
values = {"lr": 1.0, "weight_decay": 0.1, "eps": 1e-16, "std": 0.1}
assert not [d for d in cp.audit(model, optimizer, base=base, **values).departures if "switch" in str(d)]
assert "switch" not in {role.role for role in cp.plan(params="10M").roles()}  # the decoder has none
print("done")
"""


@pytest.mark.slow
def test_a_new_role_works_everywhere(tmp_path):
    """With the lines of the recipe in the two files that it names, and no other edit."""
    shutil.copytree(PACKAGE, tmp_path / "completep", ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in ROLE.items():
        path = tmp_path / "completep" / name
        text = path.read_text()
        for before, line in edits:
            assert text.count(before) == 1, before
            text = text.replace(before, line + before)
        path.write_text(text)
    (tmp_path / "use.py").write_text(USE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, tmp_path / "use.py"], env=environment, capture_output=True, text=True)
    assert ended.stdout == "done\n", ended.stderr


def test_every_role_has_a_trait_and_a_row():
    for role in Role:
        assert role.trait.start in ("random", "constant")
        assert COMPLETEP.rule(role).source
