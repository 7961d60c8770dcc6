"""The stacks of repeated blocks, names as templates, and the models that no rule covers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn

from completep.anatomy.kinds import is_product
from completep.errors import UserError, some


@dataclass(frozen=True)
class Stack:
    """A sequence of blocks of one class, as modules named `stem` + number."""

    stem: str
    side: bool = False  # tables that the blocks read, one for each of some blocks, and no blocks themselves
    lists: tuple[str, ...] = ()  # lists of experts in a block, by their names there: "mixture.experts."

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"^{re.escape(self.stem)}(\d+)(?=\.|$)")

    def depth(self, names: Iterable[str]) -> int:
        """The number of blocks that have a parameter or module among these."""
        return len({m.group(1) for name in names if (m := self.pattern.match(name))})

    def expert(self, name: str) -> str | None:
        """The number of the expert that a parameter or module belongs to."""
        match = self.pattern.match(name)
        matches = (
            (re.match(rf"\.{re.escape(e)}(\d+)(?=\.|$)", name[match.end() :]) for e in self.lists) if match else ()
        )
        return next((m.group(1) for m in matches if m), None)

    def experts(self, names: Iterable[str]) -> int:
        return len({number for name in names if (number := self.expert(name)) is not None})


def find_stacks(model: nn.Module) -> tuple[Stack, ...]:
    """Outermost groups of numbered sibling modules that are more than a single layer."""
    modules = {name: m for name, m in model.named_modules() if any(True for _ in m.parameters())}
    blocks: dict[str, list[str]] = {}
    single_layers: dict[str, list[str]] = {}
    inside: tuple[str, ...] = ()
    for name, module in modules.items():
        stem = name.rstrip("0123456789")
        if stem == name or name.startswith(inside) or not _counts(stem, modules):
            continue
        single = _is_single_layer(module)
        (single_layers if single else blocks).setdefault(stem, []).append(name)
        inside = inside if single else (*inside, name + ".")
    for stem, members in blocks.items():
        if others := single_layers.get(stem):
            kind = type(model.get_submodule(others[0])).__name__
            what = f"'{others[0]}' ({kind}) is numbered among the blocks {some(members, 3)}"
            raise UserError(what, fix="keep the blocks in a separate nn.ModuleList or nn.Sequential")
    return tuple(Stack(stem, lists=_expert_lists(model, Stack(stem))) for stem in blocks)


def _is_single_layer(module: nn.Module) -> bool:
    """A block reads and writes, so it has two matrices. It may hold them itself, without modules."""
    matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return is_product(module) or (len(matrices) < 2 and not any(True for _ in module.children()))


def find_tables(model: nn.Module, stacks: Sequence["Stack"]) -> tuple[Stack, ...]:
    """Lists of equal tables outside the blocks, numbered by layers, as nanochat's value embeddings are."""
    shapes_of: dict[str, set[tuple[int, ...]]] = {}
    for name, module in model.named_modules():
        stem = name.rstrip("0123456789")
        if isinstance(module, nn.Embedding) and stem != name and stem.endswith(".") and not in_stack(name, stacks):
            shapes_of.setdefault(stem, set()).add(tuple(module.weight.shape))
    return tuple(Stack(stem, side=True) for stem, shapes in shapes_of.items() if len(shapes) == 1)


def _expert_lists(model: nn.Module, stack: Stack) -> tuple[str, ...]:
    """Lists of equal modules in the blocks, beside a parameter with one entry or row per member: the router."""
    lists: dict[str, None] = {}
    for name, module in model.named_modules():
        match = stack.pattern.match(name)
        if match is None or not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        kinds = {(type(e), *((n, tuple(p.shape)) for n, p in e.named_parameters())) for e in module}
        parent, _, last = name.rpartition(".")
        beside = [p.shape for n, p in model.get_submodule(parent).named_parameters() if not n.startswith(f"{last}.")]
        if len(kinds) == 1 and any(len(module) in shape for shape in beside):
            lists[f"{name[match.end() + 1 :]}."] = None
    return tuple(lists)


def _counts(stem: str, modules: Iterable[str]) -> bool:
    """False if the number is part of a word, as in `dinov2`: attributes that are blocks count from 0 or 1."""
    if stem.endswith(".") or stem == "":
        return True
    return bool({int(n[len(stem) :]) for n in modules if n.startswith(stem) and n[len(stem) :].isdecimal()} & {0, 1})


def template(name: str, stacks: Sequence[Stack]) -> str:
    """A name with the number of its block replaced by `*`."""
    for stack in stacks:
        if match := stack.pattern.match(name):
            rest = name[match.end() :]
            for experts in stack.lists:
                rest = re.sub(rf"^\.{re.escape(experts)}\d+(?=\.|$)", f".{experts}*", rest)
            name = f"{stack.stem}*{rest}"
    return name


def is_expert(name: str, stacks: Sequence[Stack]) -> bool:
    """True for the parameters and modules in a list of experts, of which a forward pass runs some."""
    return any(s.expert(name) is not None for s in stacks)


def in_stack(name: str, stacks: Sequence[Stack]) -> bool:
    return any(s.pattern.match(name) for s in stacks)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# Models without a rule are refused by name. They are never treated as something else.
NO_RULE = (("LoRA adapters", r"lora_", "merge the adapters first; for peft: model.merge_and_unload()"),)
QUANTISED = re.compile(r"4bit|8bit|\.quantized\.|bitsandbytes|gptq|\bawq\b", re.I)


def refuse_what_has_no_rule(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        what = f"this model is a {type(model).__name__}, which runs compiled code that cannot be followed"
        raise UserError(what, fix="parametrize the module that it was made from, and trace or script it afterwards")
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
    _refuse_computed_weights(model)


def _refuse_computed_weights(model: nn.Module) -> None:
    """weight_norm and the like compute a layer's weight from other parameters, and no rule covers those."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None) if is_product(module) else None
        if weight is None or "weight" in module._parameters:
            continue
        registered = nn.utils.parametrize.is_parametrized(module, "weight")
        undo = "parametrize.remove_parametrizations(module, 'weight')" if registered else "remove_weight_norm(module)"
        what = f"'{name}' ({type(module).__name__}) computes its weight from other parameters, as weight_norm does"
        raise UserError(what, fix=f"use a plain layer, for example by torch.nn.utils.{undo}")


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
