"""What the parts of a model are: found by running it once and reading its autograd graph.

A pre-norm residual network is   stream = embeddings + Σ branches,   logits = readout(norm(stream)).
That sum is a tree of additions in the autograd graph. Walking it from the readout down gives, without
any knowledge of names, the readout, the final norm, the embeddings, and the *writers*: the parameters
whose product enters the stream last in each branch. `proof.py` then checks the result on numbers.

The model that is examined (the specimen) may be much smaller than the one that is trained: what is found
is stated in *templates*, names with the block's number replaced by `*`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from completep.errors import UserError, some

Node = Any  # torch.autograd.graph.Node, whose next_functions are untyped

# Operations that only move numbers about; the stream passes through them unchanged.
RESHAPES = re.compile(
    r"(Unsafe)?View|ReshapeAlias|Transpose|Permute|^T$|Unsqueeze|Squeeze|Expand|Slice|Select|Index|Alias|ToCopy|Clone|"
    r"Split|Unbind|Cat|Mean|Copy|Unflatten|Narrow"
)
SCALES = re.compile(r"^(Mul|Div)$")  # by a constant; by a parameter it is a gain
SOFTCAP = re.compile(r"^Tanh$")  # Gemma-2 squashes its logits; the multiplier belongs before that
MATMULS = re.compile(r"^(Addmm|Mm|Bmm|Baddbmm|Linear|Mv|Dot)$")


@dataclass(frozen=True)
class Stack:
    """A run of like blocks: modules named `stem` + number."""

    stem: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"^{re.escape(self.stem)}(\d+)(?=\.|$)")

    def depth(self, names: "list[str]") -> int:
        return len({m.group(1) for name in names if (m := self.pattern.match(name))})


@dataclass(frozen=True)
class Leaf:
    """Something that is added into the stream: a module's output, or bare parameters."""

    site: str | None  # the module that made it, where there is one
    parameters: tuple[str, ...]
    node: Node = field(repr=False, compare=False)


@dataclass(frozen=True)
class Readout:
    site: str | None
    weight: str
    bias: str | None
    node: Node = field(repr=False, compare=False)


@dataclass
class Trace:
    """One forward pass with its graph: which module made which node, and from what."""

    model: nn.Module
    logits: Tensor
    made_by: dict[Node, str]  # grad_fn of a parametrised module's output -> that module
    inputs: dict[str, Tensor]  # the first tensor each of those modules was given
    outputs: dict[str, Tensor]
    modules: dict[Node, str]  # the same for every module; the innermost where several return one tensor
    nodes: dict[str, Node]  # the other way round
    parameters: dict[int, str]  # id -> name


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and its kin, and Hugging Face's Conv1D, which is a linear layer stored transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_product(module: nn.Module) -> bool:
    """Modules whose output is linear in their parameters."""
    return is_linear(module) or is_convolution(module) or isinstance(module, (nn.Embedding, nn.MultiheadAttention))


def is_norm(module: nn.Module) -> bool:
    """By kin or by name, with no parameters but vectors; `roles.py` confirms on numbers that it normalises."""
    kin = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or "norm" in type(module).__name__.lower()
    alone = not any(True for _ in module.children()) and not is_product(module)
    return kin and alone and all(p.dim() == 1 for p in module.parameters())


def is_known(module: nn.Module) -> bool:
    return is_norm(module) or is_product(module)


def first_tensor(value: Any) -> Tensor | None:
    """The stream among a module's inputs or outputs: by convention the first floating tensor."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((t for v in value if (t := first_tensor(v)) is not None), None)
    return None


def find_logits(output: Any) -> Tensor | None:
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    return first_tensor(output) if found is None else found


def logits_of(output: Any) -> Tensor:
    found = find_logits(output)
    if found is None or found.grad_fn is None:
        raise UserError(
            f"the model's forward returned {type(output).__name__} with no logits that depend on its parameters",
            fix="pass example=<inputs> for which forward returns logits: a tensor, a tuple that starts with them, or .logits",
        )
    return found


def call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


def trace(model: nn.Module, example: Any) -> Trace:
    made_by: dict[Node, str] = {}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    modules: dict[Node, str] = {}
    nodes: dict[str, Node] = {}
    names = {id(module): name for name, module in model.named_modules()}
    calls = dict.fromkeys(names.values(), 0)

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, tensor = names[id(module)], first_tensor(output)
        calls[name] += 1
        if tensor is None or tensor.grad_fn is None:
            return
        nodes[name] = tensor.grad_fn  # read now: an in-place op would change it later
        modules.setdefault(tensor.grad_fn, name)
        outputs[name] = tensor
        given = first_tensor(args) if args else None
        given = first_tensor(kwargs) if given is None else given
        if given is not None:
            inputs[name] = given
        if is_known(module):
            made_by.setdefault(tensor.grad_fn, name)

    handles = [m.register_forward_hook(record, with_kwargs=True) for m in model.modules()]
    try:
        with torch.enable_grad():
            logits = logits_of(call(model, example))
    finally:
        for handle in handles:
            handle.remove()
    refuse_reuse(model, calls)
    return Trace(
        model, logits, made_by, inputs, outputs, modules, nodes, {id(p): n for n, p in model.named_parameters()}
    )


def refuse_reuse(model: nn.Module, calls: dict[str, int]) -> None:
    """A module that runs twice in one pass is stepped for both of its places; if they differ in depth, no rule fits."""
    for name, count in calls.items():
        module = model.get_submodule(name)
        if count > 1 and not isinstance(module, nn.Embedding) and any(True for _ in module.parameters()):
            raise UserError(
                f"'{name}' ({type(module).__name__}) runs {count} times in one forward pass: its gradient sums over its places",
                fix="give every place its own module; only embedding and unembedding may share weights",
            )


def op(node: Node) -> str:
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def below(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def bare_parameters(node: Node, names: dict[int, str]) -> list[str]:
    """Parameters that `node` takes as operands, directly or through reshapes."""
    found: list[str] = []
    for child in below(node):
        while RESHAPES.search(op(child)) and len(below(child)) == 1:
            child = below(child)[0]
        if op(child) == "AccumulateGrad":
            found += [names[id(child.variable)]]
    return found


def find_readout(t: Trace) -> Readout:
    """The last matrix before the logits."""
    node, bias = t.logits.grad_fn, None
    while True:
        site = t.made_by.get(node)
        module = t.model.get_submodule(site) if site is not None else None
        if module is not None and is_linear(module):
            weight = t.parameters[id(module.weight)]
            own_bias = getattr(module, "bias", None)
            return Readout(site, weight, t.parameters[id(own_bias)] if own_bias is not None else None, node)
        if module is None and MATMULS.search(op(node)):
            bare = bare_parameters(node, t.parameters)
            matrices = [n for n in bare if t.model.get_parameter(n).dim() >= 2]
            if len(matrices) == 1:
                return Readout(None, matrices[0], next((n for n in bare if n not in matrices), bias), node)
        children = below(node)
        if op(node) == "Add" and len(children) == 2:  # a bias that is added by hand
            bare = bare_parameters(node, t.parameters)
            if len(bare) == 1:
                bias = bare[0]
                node = next(c for c in children if op(c) != "AccumulateGrad" and not _leads_to(c, bias, t))
                continue
        transparent = (passes(node) or op(node) == "Add" or SOFTCAP.search(op(node))) and len(children) == 1
        if module is not None or not transparent:
            made = f"module '{site}' ({type(module).__name__})" if module is not None else f"operation {op(node)}"
            raise UserError(
                f"the logits come from {made}, not from a matrix that I can call the readout",
                fix="let forward end in an nn.Linear; a head with further layers has no rule here",
            )
        node = children[0]


def _leads_to(node: Node, parameter: str, t: Trace) -> bool:
    while RESHAPES.search(op(node)) and len(below(node)) == 1:
        node = below(node)[0]
    return op(node) == "AccumulateGrad" and t.parameters[id(node.variable)] == parameter


def activation_of(readout: Readout, t: Trace) -> Node:
    """The node of what the readout multiplies."""
    if readout.site is not None:
        return t.inputs[readout.site].grad_fn
    own = {readout.weight, readout.bias}
    return next(c for c in below(readout.node) if not any(_leads_to(c, n, t) for n in own if n))


def norms_before(node: Node, t: Trace) -> list[str]:
    """The norms between the sum of the stream and a node that reads it, the nearest first."""
    norms: list[str] = []
    while True:
        site = t.made_by.get(node)
        if site is not None and is_norm(t.model.get_submodule(site)):
            norms.append(site)
            node = t.inputs[site].grad_fn
        elif site is None and passes(node) and len(below(node)) == 1:
            node = below(node)[0]
        else:
            return norms


def own_parameters(site: str, t: Trace) -> tuple[str, ...]:
    """The parameters by which a module's output scales."""
    module = t.model.get_submodule(site)
    owner = module.out_proj if isinstance(module, nn.MultiheadAttention) else module
    return tuple(t.parameters[id(p)] for p in owner.parameters(recurse=False))


def stream_leaves(root: Node, t: Trace, sums: set[Node], *, opaque: bool = False) -> Iterator[Leaf]:
    """All that is added into the stream, walking the tree of additions down from its last sum; `sums` collects the way.

    With `opaque`, what cannot be read is passed over: the user has named the writers, and the proof will judge them.
    """
    todo: list[tuple[Node, str | None]] = [(root, None)]
    seen = {root}
    while todo:
        node, holder = todo.pop()
        holder = holder or t.modules.get(node)  # a module whose whole output this is
        children = below(node)
        if (site := t.made_by.get(node)) is not None:
            yield Leaf(site, own_parameters(site, t), node)
        elif op(node) == "AccumulateGrad":
            yield Leaf(None, (t.parameters[id(node.variable)],), node)
        elif MATMULS.search(op(node)) and (bare := bare_parameters(node, t.parameters)):
            yield Leaf(holder, tuple(bare), node)
        elif op(node) in ("Add", "Sub") or (passes(node) and children):
            sums.add(node)
            alone = len(children) == 1
            new = [child for child in children if child not in seen]
            seen.update(new)
            todo += [(child, holder if alone else None) for child in new]
        elif not opaque:
            raise _unreadable(node, t)


def passes(node: Node) -> bool:
    """Does the stream come through unchanged, but for its layout and a constant factor?"""
    return bool(RESHAPES.search(op(node)) or (SCALES.search(op(node)) and len(below(node)) == 1))


def _unreadable(node: Node, t: Trace) -> UserError:
    maker = t.modules.get(node)
    where = f" (output of '{maker}', a {type(t.model.get_submodule(maker)).__name__})" if maker else ""
    return UserError(
        f"the residual stream takes in the result of {op(node)}{where}, which no linear layer or norm made last: "
        "I cannot tell which parameters write it",
        fix="end each residual branch in nn.Linear or a norm, or name the parameters by which every branch scales: "
        "writers=['*.gate', …] (and their roles, if they have none)",
    )


def find_stacks(model: nn.Module) -> list[Stack]:
    """Outermost groups of numbered sibling modules of one class that are more than a single layer."""
    blocks: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        stem, digits = re.fullmatch(r"(.*?)(\d*)", name).groups()  # type: ignore[union-attr]
        if not digits or name.startswith(inside) or not any(True for _ in module.parameters()):
            continue
        single = is_known(module) or not any(True for _ in module.children())
        (others if single else blocks).setdefault(stem, []).append(name)
        inside = inside if single else (*inside, name + ".")
    for stem, members in blocks.items():
        if strangers := others.get(stem, []):
            raise UserError(
                f"'{strangers[0]}' ({type(model.get_submodule(strangers[0])).__name__}) is numbered among the blocks {some(members, 3)}",
                fix="keep the blocks in an nn.ModuleList or nn.Sequential of their own",
            )
    return [Stack(stem) for stem in blocks]


def template(name: str, stacks: "tuple[Stack, ...] | list[Stack]") -> str:
    """A name with the number of its block replaced by `*`."""
    for stack in stacks:
        name = stack.pattern.sub(lambda _, stem=stack.stem: stem + "*", name)  # type: ignore[misc]
    return name


def matches(name: str, patterns: "list[str] | tuple[str, ...]") -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# What has no rule yet is refused by name rather than treated as something else.
NO_RULE = {
    "LoRA adapters": (
        re.compile(r"lora_", re.I),
        "merge the adapter first (peft: model.merge_and_unload()), or parametrize before wrapping",
    ),
    "a mixture of experts": (
        re.compile(r"(^|[._])(experts?|router|moe)([._]|$)", re.I),
        "MoE routers and experts have no rule in the paper (App. D.1, category 3); use a dense model",
    ),
}


QUANTISED = re.compile(r"4bit|8bit|\.quantized\.|bitsandbytes|gptq|\bawq\b", re.I)


def refuse_what_has_no_rule(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    classes = {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in model.named_modules()}
    for what, (pattern, fix) in NO_RULE.items():
        if hits := [n for n in names if pattern.search(n)]:
            raise UserError(f"this model has {what}: {some(hits)}", fix=fix)
    quantised = [f"{n} ({p.dtype})" for n, p in model.named_parameters() if not p.is_floating_point()]
    quantised += [f"{n} ({c})" for n, c in classes.items() if QUANTISED.search(c)]
    if quantised:
        raise UserError(
            f"this model is quantised: {some(quantised)}",
            fix="parametrize the floating-point model; quantise after training",
        )
