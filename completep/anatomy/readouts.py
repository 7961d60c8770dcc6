"""The readouts: the matrices that make the results, and what stands between each of them and the stream.

A model may return several results: logits and a value, or logits for several tokens. Each comes from a readout, which
may share its weight with another one or with the embedding. From each readout the walk goes down through norms, layers
and modulations to the stream after the last block.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from completep.anatomy.blocks import Stack, in_stack
from completep.anatomy.calls import Call
from completep.anatomy.kinds import is_linear
from completep.anatomy.norms import is_invariant
from completep.anatomy.stream import (
    MATMULS,
    bare_parameters,
    below,
    from_blocks,
    graph,
    op,
    parameter_at,
    passes,
    sources,
)
from completep.anatomy.trace import Tap, Trace
from completep.errors import UserError, some

SOFTCAP = re.compile(r"^Tanh$")  # Gemma-2 squashes its logits; the multiplier acts before that


@dataclass(frozen=True)
class Readout:
    """A matrix that makes a result."""

    site: str | None
    weight: str
    bias: str | None
    node: Node = field(repr=False, compare=False)
    scale: str | None = None  # a learned number that multiplies the result, as a temperature does


@dataclass(frozen=True)
class Head:
    """A readout and what stands between it and the stream, nearest to the readout first.

    The MLM head of ModernBERT is norm → layer → GELU → norm → readout. DiT shifts and scales what its last norm returns
    by a condition.
    """

    readout: Readout
    norms: tuple[str, ...]
    layers: tuple[str, ...]  # linear layers that the stream passes
    conditions: tuple[str, ...]  # linear layers that make shifts and scales
    tap: Tap
    root: Tensor  # the stream after the last block, pooled if the model pools before its final norm

    @property
    def parameters(self) -> tuple[str, ...]:
        """Of the readout."""
        names = (self.readout.weight, self.readout.bias, self.readout.scale)
        return tuple(name for name in names if name is not None)


def find_heads(t: Trace, stacks: Sequence[Stack]) -> tuple[Head, tuple[Head, ...]]:
    """(the head that makes the logits, the heads of all other results)."""
    assert t.logits.grad_fn is not None
    logits_readout = _readout_at(t.logits.grad_fn, t)
    if not isinstance(logits_readout, Readout):
        raise _no_readout(logits_readout, t)
    first = _head(logits_readout, t, stacks)
    further = {}
    for tensor in t.results.values():
        assert tensor.grad_fn is not None
        readout = _readout_at(tensor.grad_fn, t, through_any=True)
        if not isinstance(readout, Readout) or readout.node == logits_readout.node or in_stack(readout.weight, stacks):
            continue
        if set(t.model.get_parameter(readout.weight).shape) != {
            first.root.shape[-1]
        }:  # as wide as the stream: features
            further[readout.node] = readout
    return first, tuple(head for r in further.values() if (head := head_of(r, first, t, stacks)) is not None)


def head_of(readout: Readout, first: Head, t: Trace, stacks: Sequence[Stack]) -> Head | None:
    """The head of a further readout; None if it does not read the stream after the last block."""
    try:
        head = _head(readout, t, stacks)
    except UserError:
        return None
    ends, stream = (sources(h.root.grad_fn) for h in (head, first) if h.root.grad_fn is not None)
    return head if ends & stream else None


def linear_readout(site: str, t: Trace) -> Readout | None:
    """A linear layer that you name as a readout."""
    if site not in t.inputs or not is_linear(t.module(site)) or t.inputs[site].grad_fn is None:
        return None
    return _of_module(site, t, t.nodes[site])


def _of_module(site: str, t: Trace, node: Node, scale: str | None = None) -> Readout:
    module = t.module(site)
    bias = getattr(module, "bias", None)
    name = None if bias is None else t.parameters[id(bias)]
    return Readout(site, t.parameters[id(module.weight)], name, node, scale)


def _readout_at(node: Node, t: Trace, through_any: bool = False) -> Readout | Node:
    """The last matrix before a result, or the operation that stands in the way.

    With `through_any`, operations on one tensor do not, such as the sigmoid of a value.
    """
    bias = scale = None
    while True:
        site = t.site_of(node)
        module = None if site is None else t.module(site)
        if module is not None and site is not None and is_linear(module):
            return _of_module(site, t, node, scale)
        children, bare = below(node), bare_parameters(node, t)
        if module is None and MATMULS.search(op(node)):
            matrices = [n for n in bare if t.model.get_parameter(n).dim() >= 2]
            if len(matrices) == 1:
                return Readout(None, matrices[0], next((n for n in bare if n not in matrices), bias), node, scale)
        if op(node) == "Add" and len(children) == 2 and len(bare) == 1:  # a bias that is added separately
            bias = bare[0]
            node = next(c for c in children if parameter_at(c, t) != bias)
            continue
        if (temperature := _temperature(node, t)) is not None and scale is None:
            node, scale = temperature
            continue
        known = passes(node) or op(node) == "Add" or SOFTCAP.search(op(node))
        transparent = (known or through_any) and len(children) == 1
        if module is not None or not transparent:
            return node
        node = children[0]


def _temperature(node: Node, t: Trace) -> tuple[Node, str] | None:
    """(what is multiplied, the parameter), if a learned number multiplies a result, as it is or through exp."""
    children = below(node)
    if op(node) not in ("Mul", "Div") or len(children) != 2:
        return None
    for other, factor in (children, children[::-1]):
        inner = below(factor)[0] if op(factor) == "Exp" else factor
        name = parameter_at(inner, t)
        if name is not None and t.model.get_parameter(name).numel() == 1 and other is not factor:
            return other, name
    return None


def _no_readout(node: Node, t: Trace) -> UserError:
    site = t.site_of(node)
    maker = f"operation {op(node)}" if site is None else f"module '{site}' ({type(t.module(site)).__name__})"
    what = f"the logits come from {maker}, not from a matrix that can be the readout"
    return UserError(what, fix="let forward end in an nn.Linear; there is no rule for a head with further layers")


def activation_of(readout: Readout, t: Trace) -> Node:
    """The node of the tensor that the readout multiplies."""
    if readout.site is not None:
        return t.made_by[readout.node].node_before()
    return next(c for c in below(readout.node) if parameter_at(c, t) not in (readout.weight, readout.bias or ""))


def _head(readout: Readout, t: Trace, stacks: Sequence[Stack]) -> Head:
    norms: list[Call] = []
    layers: list[str] = []
    conditions: list[str] = []
    node, reader = activation_of(readout, t), readout.site
    while True:
        if (behind := _behind_conditions(node, t, stacks)) is not None:
            node, more_conditions = behind
            conditions += more_conditions
        norms += (more := _norms_before(node, t))
        if inside := [call.site for call in more if in_stack(call.site, stacks)]:
            raise post_norm(inside[0])
        reader = more[-1].site if more else reader
        root = node if not more else more[-1].node_before()
        if not more and (tap := _functional_norm(node, t, stacks)) is not None:
            return _finished(readout, norms, layers, conditions, tap, t)
        layer = _layer_of_head(root, t, stacks)
        if layer is None:
            break
        layers.append(layer)
        node, reader = call_of(layer, t).node_before(), layer
    if reader is None:
        what = "the readout is a bare matrix product without a norm before it: its input is not the input of any module"
        raise UserError(what, fix="use nn.Linear for the readout")
    return _finished(readout, norms, layers, conditions, Tap(reader), t)


def _finished(
    readout: Readout, norms: list[Call], layers: list[str], conditions: list[str], tap: Tap, t: Trace
) -> Head:
    sites = tuple(call.site for call in norms)
    return Head(readout, sites, tuple(layers), tuple(dict.fromkeys(conditions)), tap, tap.seen(t))


def call_of(site: str, t: Trace) -> Call:
    return next(call for call in t.made_by.values() if call.site == site)


def _norms_before(node: Node, t: Trace) -> list[Call]:
    """The norms between the stream and a node that reads it, nearest to the node first."""
    norms: list[Call] = []
    while True:
        ends = sources(node)
        calls = {id(call): call for end in ends if (call := t.made_by.get(end)) is not None and call.site in t.norms}
        if len(calls) != 1 or not all(end in t.made_by for end in ends):
            return norms
        (call,) = calls.values()
        norms.append(call)
        node = call.node_before()


def _layer_of_head(root: Node, t: Trace, stacks: Sequence[Stack]) -> str | None:
    """The linear layer that stands here and not the stream: an activation may follow it."""
    if root in t.made_by:
        layer: str | None = t.made_by[root].site
    else:
        layer = None if passes(root) or op(root) in ("Add", "Sub") else _first_product(root, t)
    if layer is None or in_stack(layer, stacks) or not is_linear(t.module(layer)):
        return None
    node = t.inputs[layer].grad_fn
    return layer if node is not None and from_blocks(node, t, stacks) else None


def _behind_conditions(node: Node, t: Trace, stacks: Sequence[Stack]) -> tuple[Node, list[str]] | None:
    """(what the last norm returns, the layers that make shifts and scales for it), if a condition modulates it."""
    conditions: list[str] = []
    while True:
        children = below(node)
        if node in t.made_by or not children:
            break
        inner = [child for child in children if from_blocks(child, t, stacks)]
        if op(node) in ("Add", "Sub", "Mul") and len(children) == 2 and len(inner) == 1:
            (other,) = (child for child in children if child is not inner[0])
            conditions += [s for s in _products(other, t) if not in_stack(s, stacks)]
            node = inner[0]
        elif passes(node) and len(children) == 1:
            node = children[0]
        else:
            break
    normed = node in t.made_by and t.made_by[node].site in t.norms
    return (node, conditions) if conditions and normed else None


def _products(node: Node, t: Trace) -> Iterator[str]:
    """The linear layers nearest below a node."""
    todo, seen = [node], {node}
    while todo:
        current = todo.pop()
        site = t.site_of(current)
        if site is not None and is_linear(t.module(site)):
            yield site
            continue
        new = [child for child in below(current) if child not in seen]
        seen.update(new)
        todo += new


def _functional_norm(node: Node, t: Trace, stacks: Sequence[Stack]) -> Tap | None:
    """The place of the stream, if what follows the last block is a norm without a module.

    It is known by what it does, like any other norm: scaling the last block's output does not change what it returns.
    """
    last = _last_block(t, stacks)
    normed = next((t.made[n] for n in _with_reshapes(node) if n in t.made), None)
    if last is None or normed is None:
        return None
    stack, block = last
    stream = t.outputs[block]
    between = set(graph(t, [node], without=t.nodes[block]))
    if t.nodes[block] in sources(node) or any(n in t.made_by for n in between if n is not t.nodes[block]):
        return None
    if from_blocks(node, t, stacks, without=t.nodes[block]):
        return None
    return Tap(stack.stem, returned=True) if is_invariant(normed, stream) else None


def _with_reshapes(node: Node) -> Iterator[Node]:
    yield node
    while passes(node) and len(below(node)) == 1:
        node = below(node)[0]
        yield node


def _last_block(t: Trace, stacks: Sequence[Stack]) -> tuple[Stack, str] | None:
    """The block that ran last, if it returns a tensor."""
    ran = [(stack, name) for name in t.outputs for stack in stacks if stack.pattern.fullmatch(name)]
    return ran[-1] if ran else None


def _first_product(node: Node, t: Trace) -> str | None:
    """The nearest linear layer, norm or table below a node."""
    todo, seen = [node], {node}
    while todo:
        current = todo.pop(0)
        if (site := t.site_of(current)) is not None:
            return site
        new = [child for child in below(current) if child not in seen]
        seen.update(new)
        todo += new
    return None


def post_norm(name: str) -> UserError:
    what = f"this model is post-LN, which has no rule: the residual stream itself passes through the norm '{name}'"
    return UserError(what, fix="use pre-norm blocks, x + f(norm(x)); for torch's encoder layer: norm_first=True")


def refuse_shared_products(heads: Sequence[Head], t: Trace) -> None:
    """A weight that makes logits may be used again only in another readout: elsewhere it has no multiplier."""
    weights = {head.readout.weight for head in heads}
    known = {node for head in heads for node in _inside(head.readout, t)}
    for node in graph(t):
        shared = [n for n in bare_parameters(node, t) if n in weights] if MATMULS.search(op(node)) else []
        if shared and node not in known:
            parameter = t.model.get_parameter(shared[0])
            names = [n for n, p in t.model.named_parameters(remove_duplicate=False) if p is parameter]
            what = f"{some(names)} makes logits, and is also multiplied by something else than the last stream"
            raise UserError(what, fix="give the second product a weight of its own, or let it read the last stream")


def _inside(readout: Readout, t: Trace) -> set[Node]:
    """The nodes of a readout: of a module, all between its input and its output."""
    if readout.site is None:
        return {readout.node}
    given = t.made_by[readout.node].node_before()
    todo, seen = [readout.node], {readout.node, given}
    while todo:
        new = [child for child in below(todo.pop()) if child not in seen]
        seen.update(new)
        todo += new
    return seen - {given}
