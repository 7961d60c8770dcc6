"""The stacks of repeated blocks, names as templates, and the models that no rule covers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from completep.anatomy.kinds import is_known
from completep.errors import UserError, some


@dataclass(frozen=True)
class Stack:
    """A sequence of blocks of one class, as modules named `stem` + number."""

    stem: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"^{re.escape(self.stem)}(\d+)(?=\.|$)")

    def depth(self, names: Iterable[str]) -> int:
        return len({m.group(1) for name in names if (m := self.pattern.match(name))})


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Outermost groups of numbered sibling modules that are more than a single layer."""
    blocks: dict[str, list[str]] = {}
    single_layers: dict[str, list[str]] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        stem = name.rstrip("0123456789")
        if stem == name or name.startswith(inside) or not any(True for _ in module.parameters()):
            continue
        single = is_known(module) or not any(True for _ in module.children())
        (single_layers if single else blocks).setdefault(stem, []).append(name)
        inside = inside if single else (*inside, name + ".")
    for stem, members in blocks.items():
        if others := single_layers.get(stem):
            kind = type(model.get_submodule(others[0])).__name__
            what = f"'{others[0]}' ({kind}) is numbered among the blocks {some(members, 3)}"
            raise UserError(what, fix="keep the blocks in a separate nn.ModuleList or nn.Sequential")
    return tuple(map(Stack, blocks))


def template(name: str, stacks: Sequence[Stack]) -> str:
    """A name with the number of its block replaced by `*`."""
    for stack in stacks:
        if match := stack.pattern.match(name):
            name = f"{stack.stem}*{name[match.end() :]}"
    return name


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# Models without a rule are refused by name. They are never treated as something else.
NO_RULE = (
    ("LoRA adapters", r"lora_", "merge the adapters first; for peft: model.merge_and_unload()"),
    ("a mixture of experts", r"(^|[._])(experts?|router|moe)([._]|$)", "use a dense model (the paper's App. D.1)"),
)
QUANTISED = re.compile(r"4bit|8bit|\.quantized\.|bitsandbytes|gptq|\bawq\b", re.I)


def refuse_what_has_no_rule(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    classes = {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in model.named_modules()}
    for what, pattern, fix in NO_RULE:
        if hits := [n for n in names if re.search(pattern, n, re.I)]:
            raise UserError(f"this model has {what}: {some(hits)}", fix=fix)
    quantised = [f"{n} ({p.dtype})" for n, p in model.named_parameters() if not p.is_floating_point()]
    quantised += [f"{n} ({c})" for n, c in classes.items() if QUANTISED.search(c)]
    if quantised:
        what = f"this model is quantised: {some(quantised)}"
        raise UserError(what, fix="parametrize the floating-point model, and quantise it after training")


def refuse_sharing(model: nn.Module) -> None:
    """The gradient of a tensor that two blocks share sums over depth, and no rule covers that."""
    stacks = find_stacks(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        if len(shared) > 1 and any(s.pattern.match(n) for s in stacks for n in shared):
            what = f"one parameter is shared inside the blocks: {some(shared)}"
            raise UserError(what, fix="give every block its own parameters; only embedding and unembedding may be tied")
