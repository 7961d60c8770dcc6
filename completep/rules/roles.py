"""Parameter name → role. By module type and place in the model, then by the user's patterns; fails closed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from completep.errors import UserError, some
from completep.rules import anatomy
from completep.rules.anatomy import Leaf, Readout, Stack, Trace, matches, template
from completep.rules.table import Role


@dataclass(frozen=True)
class Part:
    """What one parameter (or all of its like, over the blocks) is."""

    role: Role
    fan_in: tuple[int, ...] = ()  # the axes that a matrix sums over; none for vectors and tables
    start: float = 0.0  # where a vector starts: 1 for a gain, 0 for a bias
    offset: float = 0.0  # 1 where the model uses (1 + gain), as Gemma does

    def folded(self, value: float, c: float) -> float:
        """`value` of a vector's entry, in the coordinates of the folded form."""
        return c * (value + self.offset) - self.offset


@dataclass(frozen=True)
class Site:
    """A place in the forward pass that a multiplier acts on, and the parameters it folds into instead."""

    module: str | None  # template of the module; None where the branch is bare arithmetic
    parameters: tuple[str, ...]  # templates


@dataclass(frozen=True)
class Anatomy:
    """All that the rules need to know of a model, in templates, so that it holds at any size."""

    stacks: tuple[Stack, ...]
    parts: Mapping[str, Part]
    branches: tuple[Site, ...]
    readout: Site
    tables: Mapping[str, float]  # embeddings by their weight, and the constant that the model multiplies each by
    width: tuple[str, int]  # the parameter and axis that N is read from
    specimen_width: int
    final_norm: str | None  # the norm closest to the readout
    stream_reader: str  # the module whose input is the stream after the last block
    tied: bool

    def template(self, name: str) -> str:
        return template(name, self.stacks)

    def stack_of(self, name: str) -> Stack | None:
        return next((s for s in self.stacks if s.pattern.match(name)), None)


@dataclass(frozen=True)
class Findings:
    """What one specimen shows, by its own parameter names."""

    trace: Trace
    stacks: tuple[Stack, ...]
    readout: Readout
    final_norms: tuple[str, ...]
    root: Tensor  # the stream after the last block, pooled if the model pools before its final norm
    writers: tuple[Leaf, ...]
    entries: tuple[Leaf, ...]
    entry_norms: tuple[str, ...]
    readers: tuple[str, ...]  # modules that are given the stream, in the order they run in
    carriers: tuple[str, ...]  # modules that give the stream out, or a part of it

    @property
    def writer_names(self) -> list[str]:
        return [name for leaf in self.writers for name in leaf.parameters]

    @property
    def stream_reader(self) -> str:
        """The module whose input is the stream after the last block."""
        site = self.final_norms[-1] if self.final_norms else self.readout.site
        assert site is not None  # dissect() refuses a bare readout with no norm
        return site

    def in_stack(self, name: str) -> bool:
        return any(s.pattern.match(name) for s in self.stacks)

    def template(self, name: str) -> str:
        return template(name, self.stacks)


def dissect(specimen: nn.Module, example: object, writers: "list[str] | None") -> Findings:
    """Run the specimen once and walk from its logits down to its embeddings."""
    stacks = tuple(anatomy.find_stacks(specimen))
    if not stacks:
        raise UserError(
            f"no repeated blocks in {type(specimen).__name__}: depth has no meaning here (zero layers?)",
            fix="give a model whose blocks are numbered siblings of one class (nn.ModuleList, nn.Sequential), at least one",
        )
    t = anatomy.trace(specimen, example)
    readout = anatomy.find_readout(t)
    final_norms = anatomy.norms_before(anatomy.activation_of(readout, t), t)
    in_stack = [n for n in final_norms if any(s.pattern.match(n) for s in stacks)]
    if in_stack:
        raise post_norm(in_stack[0])
    root = t.inputs[final_norms[-1]] if final_norms else _readout_input(readout, t)
    found, sums = _walk(root.grad_fn, t, stacks, writers)
    inner = [n for n in t.outputs if any(s.pattern.match(n) for s in stacks)]
    inner.sort(
        key=lambda n: not any(s.pattern.fullmatch(n) for s in stacks)
    )  # whole blocks first: they make the better names
    readers = tuple(n for n in inner if n in t.inputs and t.inputs[n].grad_fn in sums)
    carriers = tuple(n for n in inner if t.nodes[n] in sums)
    return Findings(t, stacks, readout, tuple(final_norms), root, *found, readers, carriers)


def post_norm(name: str) -> UserError:
    return UserError(
        f"this model is post-LN: the residual stream itself passes through the norm '{name}', so no branch can be scaled on its own",
        fix="use pre-norm blocks (x + f(norm(x)); for torch's encoder layer: norm_first=True); post-LN has no rule yet",
    )


def _readout_input(readout: Readout, t: Trace) -> Tensor:
    if readout.site is None:
        raise UserError(
            "the readout is a bare matrix product with no norm before it: I cannot see the stream that it reads",
            fix="use nn.Linear for the readout",
        )
    return t.inputs[readout.site]


def _walk(
    root: anatomy.Node, t: Trace, stacks: tuple[Stack, ...], named: "list[str] | None"
) -> tuple[tuple[tuple[Leaf, ...], tuple[Leaf, ...], tuple[str, ...]], set[anatomy.Node]]:
    """((writers, entries, norms right after the embedding), nodes on the way) of the stream that ends at `root`."""

    def inside(leaf: Leaf) -> bool:
        names = leaf.parameters or ((leaf.site,) if leaf.site else ())
        return any(s.pattern.match(name) for s in stacks for name in names)

    writers: list[Leaf] = []
    entries: list[Leaf] = []
    norms: list[str] = []
    todo = [root]
    sums: set[anatomy.Node] = set()
    while todo:
        way = sums if not norms else set()  # what stands before an embedding norm is not the stream yet
        for leaf in anatomy.stream_leaves(todo.pop(), t, way, opaque=named is not None):
            if inside(leaf):
                writers.append(leaf)
            elif leaf.site is not None and anatomy.is_norm(t.model.get_submodule(leaf.site)):
                norms.append(leaf.site)
                todo.append(t.inputs[leaf.site].grad_fn)
            else:
                _refuse_outer_matrix(leaf, t)
                entries.append(leaf)
    if not entries and not norms:
        culprit = next((w.site for w in writers if w.site and anatomy.is_norm(t.model.get_submodule(w.site))), None)
        if culprit:
            raise post_norm(culprit)
        raise UserError(
            "the stream before the readout does not reach back to an embedding: some block replaces it instead of adding to it",
            fix="use residual blocks: x + f(x)",
        )
    if named is not None:
        writers = _named_writers(writers, named, t)
    _every_branch_can_be_scaled(writers, stacks)
    source = [t.nodes[norms[0]]] if len(norms) == 1 else [e.node for e in entries] if len(entries) == 1 else []
    return (tuple(writers), tuple(entries), tuple(norms)), sums | set(source)


def _every_branch_can_be_scaled(writers: list[Leaf], stacks: tuple[Stack, ...]) -> None:
    for leaf in writers:
        if not leaf.parameters:
            raise UserError(
                f"'{leaf.site}' ends a branch and has no parameters to scale it by", fix="give that norm a gain"
            )
    for stack in stacks:
        if not any(stack.pattern.match(n) for w in writers for n in w.parameters):
            raise UserError(
                f"no block of '{stack.stem}*' adds anything to the residual stream that reaches the logits",
                fix="an encoder–decoder or auxiliary stack has no rule here; parametrize the decoder alone",
            )


def _refuse_outer_matrix(leaf: Leaf, t: Trace) -> None:
    """A linear layer outside the blocks may read the input; one that reads activations has no rule."""
    if leaf.site is not None and leaf.site in t.inputs and t.inputs[leaf.site].grad_fn is not None:
        raise UserError(
            f"'{leaf.site}' is a matrix outside the blocks that is neither input projection nor readout: there is no rule for it",
            fix="build the model without it (for OPT: word_embed_proj_dim = hidden_size)",
        )


def _named_writers(found: list[Leaf], named: list[str], t: Trace) -> list[Leaf]:
    """The user's word on what writes, instead of the graph's; the proof will judge it."""
    names = [n for n in t.parameters.values() if matches(n, named)]
    if not names:
        raise UserError(
            f"writers={named!r} match no parameter", fix=f"names look like: {some(list(t.parameters.values()), 4)}"
        )
    sites = {name: leaf.site for leaf in found for name in leaf.parameters}
    return [Leaf(sites.get(name), (name,), None) for name in names]


def assign(f: Findings, patterns: Mapping[str, Role], constants: Mapping[str, float]) -> dict[str, Part]:
    """The part that each of the specimen's parameters plays, by its own name.

    `constants` are the values at which the constructor left those parameters that it filled with one number.
    """
    parts: dict[str, Part] = {}
    unknown: dict[str, nn.Parameter] = {}
    unused = set(patterns)
    norms = {n: p for site, module in f.trace.model.named_modules() for n, p in _norm_parts(f, site, module).items()}
    for name, parameter in f.trace.model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        part = norms.get(name) or _part(f, owner, attribute, name, parameter)
        for pattern, role in patterns.items():
            if matches(name, (pattern,)):
                unused.discard(pattern)
                part = replace(part or Part(role, start=constants.get(name, 0.0)), role=role)
        if part is None:
            unknown[name] = parameter
        else:
            parts[name] = part
    if unused:
        known = some(list(f.trace.parameters.values()), 4)
        raise UserError(f"roles: no parameter matches {some(sorted(unused))}", fix=f"names look like: {known}")
    if unknown:
        raise no_role(f, unknown)
    return parts


def no_role(f: Findings, unknown: Mapping[str, nn.Parameter]) -> UserError:
    """All unknown names at once, with a guess that the user can paste and correct."""
    guesses = {}
    for name, parameter in unknown.items():
        inside, matrix = f.in_stack(name), parameter.dim() > 1
        normlike = "norm" in type(f.trace.model.get_submodule(name.rpartition(".")[0])).__name__.lower()
        guess = (
            (Role.HIDDEN if inside else Role.EMBEDDING) if matrix else (Role.HIDDEN_BIAS if inside else Role.FINAL_NORM)
        )
        guess = Role.BLOCK_NORM if normlike and inside and not matrix else guess
        guesses[f.template(name)] = f"{f.template(name)!r}: Role.{guess.name}"
    return UserError(
        f"{len(guesses)} parameters have no role: {some(list(guesses))}",
        fix="say what they are, for instance roles={" + ", ".join(list(guesses.values())[:6]) + "}",
    )


def _part(f: Findings, owner: str, attribute: str, name: str, parameter: nn.Parameter) -> Part | None:
    module = f.trace.model.get_submodule(owner)
    if name == f.readout.bias:
        return Part(Role.UNEMBEDDING_BIAS)
    if f.in_stack(name):
        return _hidden_part(module, attribute, parameter)
    entry = next((leaf for leaf in f.entries if name in leaf.parameters), None)
    if entry is not None:
        return Part(Role.EMBEDDING_BIAS if attribute == "bias" and entry.site else Role.EMBEDDING)
    if name == f.readout.weight:
        return Part(Role.UNEMBEDDING, fan_in=fan_in_axes(module, parameter) if f.readout.site else (width_axis(f),))
    return None


def _hidden_part(module: nn.Module, attribute: str, parameter: nn.Parameter) -> Part | None:
    linear = anatomy.is_linear(module) or anatomy.is_convolution(module)
    attention = isinstance(module, nn.MultiheadAttention) and attribute.startswith(
        ("in_proj", "q_proj", "k_proj", "v_proj")
    )
    if not (linear or attention):
        return None
    if parameter.dim() == 1:
        return Part(Role.HIDDEN_BIAS)
    return Part(Role.HIDDEN, fan_in=fan_in_axes(module, parameter))


def fan_in_axes(module: nn.Module, parameter: nn.Parameter) -> tuple[int, ...]:
    if type(module).__name__ == "Conv1D":  # Hugging Face's, stored transposed
        return (0,)
    return tuple(range(1, parameter.dim()))


def width_axis(f: Findings) -> int:
    """Which axis of the readout's matrix is the stream's width."""
    weight = f.trace.model.get_parameter(f.readout.weight)
    if f.readout.site is not None:
        return fan_in_axes(f.trace.model.get_submodule(f.readout.site), weight)[0]
    if isinstance(f.trace.model.get_submodule(f.readout.weight.rpartition(".")[0]), nn.Embedding):
        return 1
    if weight.shape[0] == weight.shape[1]:
        raise UserError(
            f"'{f.readout.weight}' is a square bare readout: I cannot tell its axes apart",
            fix="hold it in an nn.Linear",
        )
    return next(axis for axis, n in enumerate(weight.shape) if n == f.root.shape[-1])


def _norm_parts(f: Findings, site: str, module: nn.Module) -> dict[str, Part]:
    """The parts of a norm's parameters, if it is one, stands where the rules know it, and really normalises."""
    outside = site in f.final_norms or site in f.entry_norms
    if not anatomy.is_norm(module) or site not in f.trace.inputs or not (outside or f.in_stack(site + ".")):
        return {}
    role = Role.FINAL_NORM if outside else Role.QK_NORM if _per_head(f, site, module) else Role.BLOCK_NORM
    return {
        f"{site}.{name}": Part(role, start=start, offset=offset)
        for name, start, offset in gains_and_biases(f, site, module)
    }


def _per_head(f: Findings, site: str, module: nn.Module) -> bool:
    """Is this norm applied to each head on its own, with one gain for all of them? Then it sees more rows than tokens."""
    given, stream = f.trace.inputs[site], f.trace.inputs[f.readers[0]]
    length = max((p.numel() for p in module.parameters()), default=given.shape[-1])
    tokens = stream.numel() // stream.shape[-1]
    return given.dim() > stream.dim() or given.numel() // length > tokens


def gains_and_biases(f: Findings, site: str, module: nn.Module) -> list[tuple[str, float, float]]:
    """(name, start, offset) of a norm's vectors, measured: norms agree neither on names nor on w against 1 + w."""
    given = f.trace.inputs[site].detach()
    saved = {name: p.detach().clone() for name, p in module.named_parameters()}
    found = []
    with torch.no_grad():
        if not torch.allclose(module(given), module(3 * given), rtol=1e-2, atol=1e-2):
            return []
        for p in module.parameters():
            p.zero_()
        at_zero = module(given)
        offset = 1.0 if at_zero.abs().max() > 1e-6 else 0.0
        for name, p in module.named_parameters():
            p.fill_(1.0)
            moved = module(given) - at_zero
            p.zero_()
            if torch.allclose(moved, torch.ones_like(moved), atol=1e-5):
                found.append((name, 0.0, 0.0))  # adds itself: a bias
            elif offset == 0.0 or torch.allclose(moved, at_zero, rtol=1e-3, atol=1e-5):
                found.append((name, 1.0 - offset, offset))  # multiplies, alone or as 1 + itself: a gain
        for name, p in module.named_parameters():
            p.copy_(saved[name])
    return found
