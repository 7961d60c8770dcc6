"""The residual stream as a sum of parts, read from the autograd graph.

A pre-norm residual network is   stream = embeddings + Σ branches,   logits = readout(norm(stream)).
In the autograd graph this sum is a tree of additions. The walk from the logits down to the embeddings finds the
readout, the final norms, the embeddings, and the *writers*: the parameters whose product enters the stream last in each
branch. No name is needed for this. `proof.py` checks the result on numbers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.autograd.graph import Node

from completep.anatomy.kinds import is_linear, is_norm
from completep.anatomy.trace import Trace
from completep.errors import UserError

# Operations that only move numbers; the stream passes through them unchanged.
RESHAPES = re.compile(
    r"(Unsafe)?View|ReshapeAlias|Transpose|Permute|^T$|Unsqueeze|Squeeze|Expand|Slice|Select|Index|Alias|ToCopy|Clone|"
    r"Split|Unbind|Cat|Mean|Copy|Unflatten|Narrow"
)
SCALES = re.compile(r"^(Mul|Div)$")  # with one differentiable operand: by a constant
SOFTCAP = re.compile(r"^Tanh$")  # Gemma-2 squashes its logits; the multiplier acts before that
MATMULS = re.compile(r"^(Addmm|Mm|Bmm|Baddbmm|Linear|Mv|Dot)$")


@dataclass(frozen=True)
class Leaf:
    """One term of the sum: the output of a module, or a product with bare parameters."""

    site: str | None  # the module that made it, if there is one
    parameters: tuple[str, ...]
    node: Node | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Readout:
    """The matrix that makes the logits."""

    site: str | None
    weight: str
    bias: str | None
    node: Node = field(repr=False, compare=False)


def op(node: Node) -> str:
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def below(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def passes(node: Node) -> bool:
    """True if the stream passes unchanged, except for its layout and a constant factor."""
    return bool(RESHAPES.search(op(node)) or (SCALES.search(op(node)) and len(below(node)) == 1))


def parameter_at(node: Node, t: Trace) -> str | None:
    """The parameter that this node is, directly or through reshapes."""
    while RESHAPES.search(op(node)) and len(below(node)) == 1:
        node = below(node)[0]
    variable = getattr(node, "variable", None) if op(node) == "AccumulateGrad" else None
    return None if variable is None else t.parameters.get(id(variable))


def bare_parameters(node: Node, t: Trace) -> list[str]:
    """The parameters that are operands of this node."""
    return [name for child in below(node) if (name := parameter_at(child, t)) is not None]


def find_readout(t: Trace) -> Readout:
    """The last matrix before the logits."""
    node, bias = t.logits.grad_fn, None
    assert node is not None
    while True:
        site = t.made_by.get(node)
        module = None if site is None else t.module(site)
        if module is not None and is_linear(module):
            own_bias = getattr(module, "bias", None)
            name = None if own_bias is None else t.parameters[id(own_bias)]
            return Readout(site, t.parameters[id(module.weight)], name, node)
        children, bare = below(node), bare_parameters(node, t)
        if module is None and MATMULS.search(op(node)):
            matrices = [n for n in bare if t.model.get_parameter(n).dim() >= 2]
            if len(matrices) == 1:
                return Readout(None, matrices[0], next((n for n in bare if n not in matrices), bias), node)
        if op(node) == "Add" and len(children) == 2 and len(bare) == 1:  # a bias that is added separately
            bias = bare[0]
            node = next(c for c in children if parameter_at(c, t) != bias)
            continue
        transparent = (passes(node) or op(node) == "Add" or SOFTCAP.search(op(node))) and len(children) == 1
        if module is not None or not transparent:
            maker = f"module '{site}' ({type(module).__name__})" if module is not None else f"operation {op(node)}"
            what = f"the logits come from {maker}, not from a matrix that can be the readout"
            fix = "let forward end in an nn.Linear; there is no rule for a head with further layers"
            raise UserError(what, fix=fix)
        node = children[0]


def activation_of(readout: Readout, t: Trace) -> Node:
    """The node of the tensor that the readout multiplies."""
    if readout.site is not None:
        return t.node_before(readout.site)
    return next(c for c in below(readout.node) if parameter_at(c, t) not in (readout.weight, readout.bias or ""))


def norms_before(node: Node, t: Trace) -> list[str]:
    """The norms between the stream and a node that reads it, nearest to the node first."""
    norms: list[str] = []
    while True:
        site = t.made_by.get(node)
        if site is not None and is_norm(t.module(site)):
            norms.append(site)
            node = t.node_before(site)
        elif site is None and passes(node) and len(below(node)) == 1:
            node = below(node)[0]
        else:
            return norms


def stream_leaves(root: Node, t: Trace, sums: set[Node], *, opaque: bool = False) -> Iterator[Leaf]:
    """The terms of the stream that ends at `root`. The nodes of the sum itself are added to `sums`.

    With `opaque`, unreadable terms are skipped: you named the writers, and the proof checks them.
    """
    todo: list[tuple[Node, str | None]] = [(root, None)]
    seen = {root}
    while todo:
        node, holder = todo.pop()
        holder = holder or t.modules.get(node)  # the module that returns this tensor
        children = below(node)
        if (site := t.made_by.get(node)) is not None:
            yield Leaf(site, _own_parameters(site, t), node)
        elif op(node) == "AccumulateGrad" and (name := parameter_at(node, t)):
            yield Leaf(None, (name,), node)
        elif MATMULS.search(op(node)) and (bare := bare_parameters(node, t)):
            yield Leaf(holder, tuple(bare), node)
        elif op(node) in ("Add", "Sub") or (passes(node) and children):
            sums.add(node)
            new = [child for child in children if child not in seen]
            seen.update(new)
            todo += [(child, holder if len(children) == 1 else None) for child in new]
        elif not opaque:
            raise _unreadable(node, t)


def _own_parameters(site: str, t: Trace) -> tuple[str, ...]:
    """The parameters that the module's output is linear in."""
    module = t.module(site)
    owner = module.out_proj if isinstance(module, nn.MultiheadAttention) else module
    return tuple(t.parameters[id(p)] for p in owner.parameters(recurse=False))


def _unreadable(node: Node, t: Trace) -> UserError:
    maker = t.modules.get(node)
    where = f" (output of '{maker}', a {type(t.module(maker)).__name__})" if maker else ""
    what = f"the residual stream takes in the result of {op(node)}{where}, which is neither a linear layer nor a norm"
    fix = (
        "end each branch in nn.Linear or a norm, or name the parameters that scale it: writers=['*.gate'] and roles={…}"
    )
    return UserError(what, fix=fix)
