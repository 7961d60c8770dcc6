"""A specimen → its anatomy: find the roles of its parameters and prove them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.anatomy.blocks import refuse_sharing, refuse_what_has_no_rule
from completep.anatomy.dissect import Dissection, dissect
from completep.anatomy.kinds import is_linear
from completep.anatomy.proof import Proven, prove, randomise_, set_stream_scales_
from completep.anatomy.readouts import Head, activation_of
from completep.anatomy.roles import Anatomy, Outlet, Part, Site, assign, further_heads, readout_axis, width_of
from completep.anatomy.specimen import guess_example
from completep.anatomy.stream import MATMULS, below, graph, op, passes, sources
from completep.anatomy.trace import Example, recording
from completep.errors import UserError
from completep.rules.table import Role

LEAST_ENTRIES = 16  # this many random numbers practically never all have the same sign
SHORT = 256  # entries of a parameter that may scale the stream: one or two per layer


@recording()
def examine(
    specimen: nn.Module,
    *,
    example: Example | None = None,
    patterns: Mapping[str, Role] | None = None,
    writers: Sequence[str] | None = None,
) -> Anatomy:
    """Find and prove the roles of a model that can be run. This overwrites the weights of the specimen.

    The specimen is run three times, and then twice for each kind of branch: seven times for attention and MLP.
    """
    refuse_what_has_no_rule(specimen)
    refuse_sharing(specimen)
    filled = {n: p.flatten() for n, p in specimen.named_parameters() if p.numel()}
    constants = {n: values[0].item() for n, values in filled.items() if (values == values[0]).all()}
    deliberate = {name for name, values in filled.items() if name not in constants and _is_one_sided(values)}
    short = {name: tuple(values.tolist()) for name, values in filled.items() if len(values) <= SHORT}
    randomise_(specimen)
    example = guess_example(specimen) if example is None else example
    dissection = dissect(specimen, example, writers)
    parts = assign(dissection, patterns or {}, constants, deliberate, short)
    heads = further_heads(dissection, parts)
    set_stream_scales_(specimen, parts.__getitem__)
    return _anatomy(dissection, parts, heads, prove(dissection, parts, heads, example))


def _is_one_sided(values: Tensor) -> bool:
    """True if a constructor chose where a bias starts, as Mamba's for its time steps. By chance it does not happen."""
    return len(values) >= LEAST_ENTRIES and bool((values > 0).all() or (values < 0).all())


def _anatomy(d: Dissection, parts: Mapping[str, Part], heads: Sequence[Head], proven: Proven) -> Anatomy:
    """What was found, in templates."""
    by_template: dict[str, Part] = {}
    for name, part in parts.items():
        first = by_template.setdefault(d.template(name), part)
        if first != part:
            raise _differs(d.template(name), first, part)
    _refuse_mixed_layouts(d)
    sites = [Site(d.template(w.site) if w.site else None, tuple(map(d.template, w.parameters))) for w in d.writers]
    outlets = [_outlet(d, head, parts) for head in (d.head, *heads)]
    return Anatomy(
        stacks=d.stacks,
        parts=by_template,
        branches=tuple(dict.fromkeys(sites)),
        readout=outlets[0],
        heads=tuple(outlets[1:]),
        readers=_readers(d, outlets),
        norms=frozenset(map(d.template, d.trace.norms)),
        tables=proven.scales,
        width=width_of(d),
        specimen_width=d.head.root.shape[-1],
        final_norm=d.head.norms[0] if d.head.norms else None,
        tap=d.tap,
        tied=parts[d.readout.weight].role is Role.EMBEDDING,
        normed_entry=d.normed_entry,
        unchecked=proven.unchecked,
        gates=_gates(d, heads),
        conditions=frozenset(_condition_parameters(d, heads)),
    )


def _differs(name: str, first: Part, part: Part) -> UserError:
    same_layout = "use the same layout in all blocks of a stack"
    if replace(first, role=part.role) != part:
        return UserError(f"'{name}' acts in one way in one block and in another way in another", fix=same_layout)
    what = f"'{name}' is a {first.role} in one block and a {part.role} in another"
    return UserError(what, fix=f"{same_layout}, or name its role: roles={{{name!r}: Role.{first.role.name}}}")


def _refuse_mixed_layouts(d: Dissection) -> None:
    """One multiplier stands for the same place in all blocks, so this place must end a branch in all of them."""
    writers = set(d.writer_names)
    templates = {d.template(name): name for name in writers}
    for name in d.trace.parameters.values():
        if name not in writers and (writer := templates.get(d.template(name))) is not None:
            what = f"'{writer}' ends a branch, but '{name}', its counterpart in another block, does not"
            raise UserError(what, fix="use the same layout in all blocks that have these parameters")


def _outlet(d: Dissection, head: Head, parts: Mapping[str, Part]) -> Outlet:
    """A readout, with what can hold the logit multiplier: its matrix, or the norm before it if that is an embedding."""
    weight, axis = head.readout.weight, readout_axis(d, head.readout)
    ways = sources(activation_of(head.readout, d.trace))
    norm = next((norm for norm in head.norms if ways == {d.trace.nodes[norm]}), None)
    read = head.norms[0] if head.conditions and not head.layers else norm  # a condition of zero changes nothing
    if parts[weight].role is not Role.EMBEDDING:
        return Outlet(head.readout.site, weight, axis, (weight,), read)
    vectors = d.trace.module(norm).parameters(recurse=False) if norm and not _others_read(d, norm) else ()
    return Outlet(head.readout.site, weight, axis, tuple(d.trace.parameters[id(p)] for p in vectors), read)


def _readers(d: Dissection, outlets: Sequence[Outlet]) -> dict[str, str]:
    """The weights that read a norm which holds the multiplier of a tied readout: each takes it back."""
    tied = [o for o in outlets if o.parameters and o.weight not in o.parameters]
    holders = {o.parameters[0].rpartition(".")[0]: o.parameters[0] for o in tied}
    modules = {o.module for o in tied}
    holder_of: dict[str, str] = {}
    for norm, holder in holders.items():
        for site in _linear_readers(d, norm):
            if site not in modules:
                holder_of[d.trace.parameters[id(d.trace.module(site).weight)]] = holder
    return holder_of


def _linear_readers(d: Dissection, norm: str) -> dict[str, Node]:
    """The linear layers that are given what a norm returns, each with the node of its input."""
    ways = _ways_from(d, norm)
    given = {site: x.grad_fn for site, x in d.trace.inputs.items() if is_linear(d.trace.module(site))}
    return {site: node for site, node in given.items() if node is not None and node in ways}


def _ways_from(d: Dissection, norm: str) -> set[Node]:
    """The node that a norm returned, and those that only move its numbers or multiply them by a constant."""
    ways = {d.trace.nodes[norm]}
    nodes = list(graph(d.trace))
    while more := {n for n in nodes if n not in ways and passes(n) and len(below(n)) == 1 and below(n)[0] in ways}:
        ways |= more
    return ways


def _others_read(d: Dissection, norm: str) -> bool:
    """True if something else than a matrix reads what a norm returns: it would see the multiplier in its gain."""
    ways = _ways_from(d, norm)
    if any(result.grad_fn in ways for result in d.trace.results.values()):  # forward returns it
        return True
    return any(set(below(node)) & ways and node not in ways and not MATMULS.search(op(node)) for node in graph(d.trace))


def _gates(d: Dissection, heads: Sequence[Head]) -> frozenset[str]:
    """What makes factors on branches, on embeddings and on results."""
    temperatures = {head.readout.scale for head in (d.head, *heads) if head.readout.scale is not None}
    return frozenset(d.template(n) for leaf in (*d.writers, *d.entries) for n in leaf.gates) | temperatures


def _condition_parameters(d: Dissection, heads: Sequence[Head]) -> list[str]:
    sites = [site for head in (d.head, *heads) for site in head.conditions]
    return [d.trace.parameters[id(p)] for site in sites for p in d.trace.module(site).parameters(recurse=False)]
