"""The residual stream as a sum of parts, read from the autograd graph.

A pre-norm residual network is   stream = embeddings + Σ branches,   logits = readout(norm(stream)).
In the autograd graph this sum is a tree of additions. The walk from the logits down to the embeddings finds the
readout, the final norms, the embeddings, and the *writers*: the parameters whose product enters the stream last in each
branch. No name is needed for this. `proof.py` checks the result on numbers.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.anatomy.blocks import Stack, in_stack, template
from completep.anatomy.norms import is_invariant
from completep.anatomy.trace import Trace
from completep.errors import UserError

# Operations that only move numbers; the stream passes through them unchanged.
RESHAPES = re.compile(
    r"(Unsafe)?View|ReshapeAlias|Transpose|Permute|^T$|Unsqueeze|Squeeze|Expand|Slice|Select|Index|Alias|ToCopy|Clone|"
    r"Split|Unbind|Cat|Mean|Copy|Unflatten|Narrow|^Sum$|Scatter|Gather|MaskedFill|Repeat"
)
SCALES = re.compile(r"^(Mul|Div)$")  # with one differentiable operand: by a constant
MATMULS = re.compile(r"^(Addmm|Mm|Bmm|Baddbmm|Linear|Mv|Dot|GroupedMm)$")
CONVOLUTIONS = re.compile(r"Convolution|Embedding")


@dataclass(frozen=True)
class Leaf:
    """One term of the sum: the output of a module, or a product with bare parameters."""

    site: str | None  # the module that made it, if there is one
    parameters: tuple[str, ...]
    node: Node | None = field(default=None, repr=False, compare=False)
    inside: tuple[str, ...] = field(default=(), repr=False, compare=False)  # modules whose output has it, inner last
    gates: tuple[str, ...] = field(
        default=(), repr=False, compare=False
    )  # parameters that make what it is multiplied by


def op(node: Node) -> str:
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def below(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def passes(node: Node) -> bool:
    """True if the stream passes unchanged, except for its layout and a constant factor."""
    return bool(RESHAPES.search(op(node)) or (SCALES.search(op(node)) and len(below(node)) == 1))


def parameter_at(node: Node, t: Trace) -> str | None:
    """The parameter that this node is, directly or behind reshapes and constant factors."""
    while passes(node) and len(below(node)) == 1:
        node = below(node)[0]
    variable = getattr(node, "variable", None) if op(node) == "AccumulateGrad" else None
    return None if variable is None else t.parameters.get(id(variable))


def bare_parameters(node: Node, t: Trace) -> list[str]:
    """The parameters that are operands of this node."""
    return [name for child in below(node) if (name := parameter_at(child, t)) is not None]


def sources(node: Node) -> set[Node]:
    """Where a tensor comes from, behind reshapes, means and constant factors. A head may join several tokens."""
    ends: set[Node] = set()
    todo, seen = [node], {node}
    while todo:
        current = todo.pop()
        children = below(current)
        if not children or not passes(current):
            ends.add(current)
        todo += [child for child in children if passes(current) and child not in seen]
        seen.update(children)
    return ends


def from_blocks(root: Node, t: Trace, stacks: Sequence[Stack], without: Node | None = None) -> bool:
    """True if a tensor depends on a parameter of the blocks, by a way that does not pass `without`."""
    return any(in_stack(name, stacks) for name in used_parameters(t, [root], without))


def stream_leaves(root: Node, t: Trace, stacks: Sequence[Stack], sums: set[Node], scales: set[str]) -> Iterator[Leaf]:
    """The terms of the stream that ends at `root`. The nodes of the sum itself are added to `sums`.

    Parameters that multiply the whole stream by one number, or mix the embedding into it again, are added to `scales`.
    A term that is neither a product nor a norm has no parameters: it cannot be read.
    """
    todo: list[tuple[Node, str | None, tuple[str, ...], tuple[str, ...]]] = [(root, None, (), ())]
    seen = {root}
    while todo:
        node, holder, inside, gates = todo.pop()
        holder = holder or t.modules.get(node)  # the module that returns this tensor
        inside = (*inside, t.modules[node]) if node in t.modules else inside
        children = below(node)
        if (site := t.site_of(node)) is not None:
            yield Leaf(site, _own_parameters(site, t), node, inside, gates)
        elif op(node) == "AccumulateGrad" and (name := parameter_at(node, t)):
            yield Leaf(None, (name,), node, inside, gates)
        elif MATMULS.search(op(node)) and (bare := bare_parameters(node, t)):
            yield Leaf(holder, tuple(bare), node, inside, gates)
        elif (scaled := _scaled(node, t, stacks)) is not None:
            behind, name = scaled
            scales.add(name)
            sums.add(node)
            new = [behind] if behind not in seen else []
            seen.update(new)
            todo += [(child, None, inside, gates) for child in new]
        elif (pair := _gated(node, t)) is not None:
            behind, gate = pair
            new = [behind] if behind not in seen else []
            seen.update(new)
            todo += [(child, holder, inside, (*gates, *_nearest_parameters(gate, t))) for child in new]
        elif op(node) in ("Add", "Sub") or (passes(node) and children):
            sums.add(node)
            new = [child for child in children if child not in seen]
            seen.update(new)
            todo += [(child, holder if len(children) == 1 else None, inside, gates) for child in new]
        else:
            yield Leaf(holder, (), node, inside, gates)


def _gated(node: Node, t: Trace) -> tuple[Node, Node] | None:
    """(what a gate multiplies, the gate), as a router's weight multiplies the output of an expert: gate · (W h + b).

    The gate is the smaller factor, which is the same for all features of a token, or a parameter. What it multiplies
    must end in products with parameters of the model, and not be the stream itself.
    """
    children = below(node)
    if op(node) != "Mul" or len(children) != 2:
        return None
    sizes = [_size(child) for child in children]
    gates = [parameter_at(child, t) is not None for child in children]
    if not any(gates) and sizes[0] == sizes[1]:
        return None
    first = gates[1] or (not gates[0] and sizes[0] > sizes[1])
    behind, gate = children if first else children[::-1]
    given, made = tensor_of(behind, t), t.made.get(node)
    if given is not None and made is not None and is_invariant(made, given):  # the gate is 1 / size: a norm
        return None
    return (behind, gate) if _ends_in_products(behind, t) else None


def tensor_of(node: Node, t: Trace) -> Tensor | None:
    """What an operation or module returned."""
    call = t.made_by.get(node)
    return t.made.get(node) if call is None else call.made


def _scaled(node: Node, t: Trace, stacks: Sequence[Stack]) -> tuple[Node, str] | None:
    """(the stream or the embedding, the parameter), if one learned number multiplies it: λ·x."""
    children = below(node)
    names = [parameter_at(child, t) for child in children]
    if op(node) != "Mul" or len(children) != 2 or [n is None for n in names].count(True) != 1:
        return None
    first = names[0] is None
    (behind, gate), name = (children if first else children[::-1]), names[1] if first else names[0]
    if name is None or _size(gate) != 1:
        return None
    stream = [end for end in sources(behind) if end not in t.made_by and op(end) in ("Add", "Sub", "Mul")]
    sums = all(op(end) != "Mul" or _scaled(end, t, stacks) is not None for end in stream)
    branch = _ends_in_products(behind, t) and not _has_table(behind, t)
    whole = len(stream) == len(sources(behind)) and sums and not branch
    return (behind, name) if whole or not from_blocks(behind, t, stacks) else None


def _has_table(root: Node, t: Trace) -> bool:
    """True if a sum of products has an embedding among its terms: then it is the stream after the first block."""
    todo, seen = [root], {root}
    while todo:
        node = todo.pop()
        if node in t.made_by:
            if isinstance(t.made_by[node].module, nn.Embedding):
                return True
            continue
        new = [child for child in below(node) if child not in seen]
        seen.update(new)
        todo += new
    return False


def _nearest_parameters(node: Node, t: Trace) -> list[str]:
    """The parameters of the products nearest below a node, or the parameter that it is."""
    if (parameter := parameter_at(node, t)) is not None:
        return [parameter]
    todo, seen = [node], {node}
    names: list[str] = []
    while todo:
        current = todo.pop()
        if (site := t.site_of(current)) is not None:
            names += _own_parameters(site, t)
            continue
        names += bare_parameters(current, t)
        if MATMULS.search(op(current)):
            continue
        new = [child for child in below(current) if child not in seen]
        seen.update(new)
        todo += new
    return names


def _size(node: Node) -> int:
    """The number of entries of the first tensor that an operation made. An expert without tokens counts as with one."""
    return math.prod(max(length, 1) for length in node._input_metadata[0].shape)


def _ends_in_products(root: Node, t: Trace) -> bool:
    """True if a tensor is a sum of products with parameters and nothing else."""
    todo, seen, products = [root], {root}, 0
    while todo:
        node = todo.pop()
        site = t.site_of(node)
        if site is not None or (MATMULS.search(op(node)) and bare_parameters(node, t)):
            products += 1
            continue
        if parameter_at(node, t) is not None:
            continue
        new = [child for child in below(node) if child not in seen]
        if not new or not (op(node) == "Add" or passes(node)):
            return False
        seen.update(new)
        todo += new
    return products > 0


def held(writers: Sequence[Leaf], others: Sequence[Leaf], t: Trace) -> list[Leaf]:
    """The writers, with a module to act on for products with bare parameters, if there is one.

    It is the innermost module that returns a sum of such products and nothing else, so a factor on it scales only them.
    """
    single = [leaf for leaf in (*writers, *others) if leaf in others or leaf.node in t.made_by]
    taken = {module for leaf in single for module in leaf.inside}
    sites: dict[Leaf, str | None] = {}
    for leaf in writers:
        bare = leaf.parameters and leaf.node not in t.made_by
        free = (module for module in reversed(leaf.inside) if module not in taken)
        sites[leaf] = next(free, leaf.site) if bare else leaf.site
    for leaf, site in list(sites.items()):
        inner = [other for other in writers if site in other.inside and sites[other] != site]
        if site is not None and leaf.node not in t.made_by and inner:  # a factor on it would act twice on these
            sites[leaf] = None
    return list(dict.fromkeys(replace(leaf, site=site) for leaf, site in sites.items()))


def _own_parameters(site: str, t: Trace) -> tuple[str, ...]:
    """The parameters that the module's output is linear in."""
    module = t.module(site)
    owner = module.out_proj if isinstance(module, nn.MultiheadAttention) else module
    return tuple(t.parameters[id(p)] for p in owner.parameters(recurse=False))


def is_readable(leaf: Leaf, t: Trace) -> bool:
    return bool(leaf.parameters) or leaf.node in t.made_by


def refuse_unreadable(leaves: Sequence[Leaf], t: Trace, stacks: Sequence[Stack]) -> None:
    """A branch must end in a linear layer or a norm, or in a gain that you name."""
    unreadable = [leaf for leaf in leaves if not is_readable(leaf, t)]
    if not unreadable:
        return
    node = unreadable[0].node
    assert node is not None
    maker = t.modules.get(node)
    where = f" (output of '{maker}', a {type(t.module(maker)).__name__})" if maker else ""
    what = f"the residual stream takes in the result of {op(node)}{where}, which is neither a linear layer nor a norm"
    gains = {leaf: _gain(leaf, t, stacks) for leaf in unreadable}
    if None in gains.values():
        raise UserError(what, fix="end each branch in nn.Linear or a norm")
    named = dict.fromkeys(template(gain, stacks) for gain in gains.values() if gain)
    others = [n for leaf in leaves for n in leaf.parameters if in_stack(n, stacks)]
    writers = list(dict.fromkeys([*named, *(template(n, stacks) for n in others)]))
    roles = ", ".join(f"{gain!r}: Role.BLOCK_NORM" for gain in named)
    # Without a module at the end of a branch, only the gain can hold a multiplier.
    style = "" if all(leaf.site for leaf in unreadable) else ", style='folded'"
    raise UserError(what, fix=f"name the gains that end the branches: writers={writers}, roles={{{roles}}}{style}")


def _gain(leaf: Leaf, t: Trace, stacks: Sequence[Stack]) -> str | None:
    """The parameter of a block that a branch is multiplied by, as in LayerScale. The stream itself must not be."""
    if leaf.node is None or op(leaf.node) != "Mul":
        return None
    operands = [end for child in below(leaf.node) for end in sources(child) if parameter_at(child, t) is None]
    if any(op(end) in ("Add", "Sub") and end not in t.made_by for end in operands):
        return None
    return next((name for name in bare_parameters(leaf.node, t) if in_stack(name, stacks)), None)


def graph(t: Trace, roots: Sequence[Node] | None = None, without: Node | None = None) -> Iterator[Node]:
    """All nodes that these depend on; by default, those of all results. The ways end at `without`."""
    results = (tensor.grad_fn for tensor in (t.logits, *t.results.values()))
    todo = [node for node in results if node is not None] if roots is None else list(roots)
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        new = [child for child in below(node) if child not in seen] if node is not without else []
        seen.update(new)
        todo += new


def used_parameters(t: Trace, roots: Sequence[Node] | None = None, without: Node | None = None) -> set[str]:
    """The parameters that these nodes depend on; by default, all results."""
    nodes = graph(t, roots, without)
    return {name for node in nodes if op(node) == "AccumulateGrad" and (name := parameter_at(node, t)) is not None}


def multiplied_parameters(t: Trace) -> dict[str, bool]:
    """The parameters that are factors of a matrix product or convolution, and whether with activations.

    All others act elementwise.
    """
    with_activations: dict[str, bool] = {}
    for node in graph(t):
        if MATMULS.search(op(node)) or CONVOLUTIONS.search(op(node)):
            activations = any(parameter_at(child, t) is None for child in below(node))
            for name in bare_parameters(node, t):
                with_activations[name] = with_activations.get(name, False) or activations
    return with_activations


def elementwise_parameters(t: Trace, stacks: Sequence[Stack]) -> set[str]:
    """The parameters of blocks that act on activations entry by entry: gates, decays, scales, shifts.

    Parameters that enter a matrix product, even after other operations (a normalised weight), do not count.
    """
    flows: dict[Node, bool] = {}  # depends on a parameter outside the blocks, so it is an activation
    matrices: set[str] = set()
    for node in _children_first(t):
        name = parameter_at(node, t) if op(node) == "AccumulateGrad" else None
        children = below(node)
        flows[node] = any(flows[c] for c in children) or (name is not None and not in_stack(name, stacks))
        if MATMULS.search(op(node)) or CONVOLUTIONS.search(op(node)):
            matrices |= {n for c in children if not flows[c] for n in _parameters_below(c, t)}
    return {name for name in used_parameters(t) - matrices if in_stack(name, stacks)}


def _children_first(t: Trace) -> Iterator[Node]:
    results = (tensor.grad_fn for tensor in (t.logits, *t.results.values()))
    todo: list[tuple[Node, bool]] = [(node, False) for node in results if node is not None]
    seen: set[Node] = set()
    while todo:
        node, ready = todo.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(child, False) for child in below(node) if child not in seen]


def _parameters_below(node: Node, t: Trace) -> set[str]:
    todo, seen, names = [node], {node}, set()
    while todo:
        current = todo.pop()
        if op(current) == "AccumulateGrad" and (name := parameter_at(current, t)) is not None:
            names.add(name)
        new = [child for child in below(current) if child not in seen]
        seen.update(new)
        todo += new
    return names
