"""Parameter name → role. By module type and place in the model, then by the user's patterns; fails closed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from completep.errors import UserError, some
from completep.rules import anatomy
from completep.rules.anatomy import Leaf, Readout, Stack, Trace, matches
from completep.rules.table import Role


@dataclass(frozen=True)
class Part:
    """What one parameter (or all of its like, over the blocks) is."""

    role: Role
    fan_in: tuple[int, ...] = ()  # the axes that a matrix sums over; none for vectors and tables
    start: float = 0.0  # where a vector starts: 1 for a gain, 0 for a bias
    offset: float = 0.0  # 1 where the model uses (1 + gain), as Gemma does


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
    embeddings: tuple[Site, ...]  # only those that the model itself multiplies by sqrt(N)
    width: tuple[str, int]  # the parameter and axis that N is read from
    final_norm: str | None  # the norm closest to the readout
    stream_reader: str  # the module whose input is the stream after the last block
    tied: bool

    def template(self, name: str) -> str:
        for stack in self.stacks:
            name = stack.template(name)
        return name

    def stack_of(self, name: str) -> Stack | None:
        return next((s for s in self.stacks if s.pattern.match(name)), None)


@dataclass(frozen=True)
class Findings:
    """What one specimen shows, by its own parameter names."""

    trace: Trace
    stacks: tuple[Stack, ...]
    readout: Readout
    final_norms: tuple[str, ...]
    root: Tensor  # the stream after the last block
    writers: tuple[Leaf, ...]
    entries: tuple[Leaf, ...]
    entry_norms: tuple[str, ...]

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
    final_norms, root_node = anatomy.find_norm_above(anatomy.activation_of(readout, t), t)
    in_stack = [n for n in final_norms if any(s.pattern.match(n) for s in stacks)]
    if in_stack:
        raise post_norm(in_stack[0])
    found = _walk(root_node, t, stacks, writers)
    root = t.inputs[final_norms[-1]] if final_norms else _readout_input(readout, t)
    return Findings(t, stacks, readout, tuple(final_norms), root, *found)


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
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...], tuple[str, ...]]:
    """(writers, entries, norms right after the embedding) of the stream that ends at `root`."""

    def inside(leaf: Leaf) -> bool:
        return any(s.pattern.match(name) for s in stacks for name in leaf.parameters)

    writers, entries, norms, todo = [], [], [], [root]
    while todo:
        for leaf in anatomy.stream_leaves(todo.pop(), t):
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
    for stack in stacks:
        if not any(stack.pattern.match(n) for w in writers for n in w.parameters):
            raise UserError(
                f"no block of '{stack.stem}*' adds anything to the residual stream that reaches the logits",
                fix="an encoder–decoder or auxiliary stack has no rule here; parametrize the decoder alone",
            )
    return tuple(writers), tuple(entries), tuple(norms)


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


def assign(f: Findings, patterns: Mapping[str, Role]) -> dict[str, Part]:
    """The part that each of the specimen's parameters plays, by its own name."""
    model = f.trace.model
    parts: dict[str, Part] = {}
    unknown: dict[str, nn.Parameter] = {}
    unused = set(patterns)
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        part = _part(f, owner, attribute, name, parameter)
        for pattern, role in patterns.items():
            if matches(name, (pattern,)):
                unused.discard(pattern)
                part = replace(part or _bare(role, parameter), role=role)
        if part is None:
            unknown[name] = parameter
        else:
            parts[name] = part
    if unused:
        raise UserError(
            f"roles: no parameter matches {some(sorted(unused))}",
            fix=f"names look like: {some(list(f.trace.parameters.values()), 4)}",
        )
    if unknown:
        raise no_role(f, unknown)
    return parts


def no_role(f: Findings, unknown: Mapping[str, nn.Parameter]) -> UserError:
    """All unknown names at once, with a guess that the user can paste and correct."""
    guesses = {}
    for name, parameter in unknown.items():
        inside = f.in_stack(name)
        guess = (
            (Role.HIDDEN if inside else Role.EMBEDDING)
            if parameter.dim() > 1
            else (Role.HIDDEN_BIAS if inside else Role.FINAL_NORM)
        )
        pattern = name
        for stack in f.stacks:
            pattern = stack.template(pattern)
        guesses[pattern] = f"{pattern!r}: Role.{guess.name}"
    return UserError(
        f"{len(guesses)} parameters have no role: {some(list(guesses))}",
        fix="say what they are, for instance roles={" + ", ".join(list(guesses.values())[:6]) + "}",
    )


def _bare(role: Role, parameter: nn.Parameter) -> Part:
    return Part(role, start=1.0 if role in (Role.BLOCK_NORM, Role.QK_NORM, Role.FINAL_NORM) else 0.0)


def _part(f: Findings, owner: str, attribute: str, name: str, parameter: nn.Parameter) -> Part | None:
    module = f.trace.model.get_submodule(owner)
    if name == f.readout.bias:
        return Part(Role.UNEMBEDDING_BIAS)
    if anatomy.is_norm(module):
        return _norm_part(f, owner, module, attribute)
    if f.in_stack(name):
        return _hidden_part(module, attribute, parameter)
    entry = next((leaf for leaf in f.entries if name in leaf.parameters), None)
    if isinstance(module, nn.Embedding):
        return Part(Role.EMBEDDING)
    if entry is not None and (entry.site is None or f.trace.inputs.get(entry.site, parameter).grad_fn is None):
        return Part(Role.EMBEDDING_BIAS if attribute == "bias" else Role.EMBEDDING)
    if name == f.readout.weight:
        return Part(Role.UNEMBEDDING, fan_in=fan_in_axes(module, parameter))
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


def _norm_part(f: Findings, site: str, module: nn.Module, attribute: str) -> Part | None:
    outside = {*f.final_norms, *f.entry_norms}
    if not f.in_stack(site + ".") and site not in outside:
        return None
    if attribute == "bias":
        start, offset = 0.0, 0.0
    elif attribute in ("weight", "gain", "scale", "gamma", "g"):
        offset = norm_offset(f, site, module, attribute)
        start = 1.0 - offset
    else:
        return None
    if site in outside:
        return Part(Role.FINAL_NORM, start=start, offset=offset)
    role = Role.QK_NORM if _per_head(f, site, module) else Role.BLOCK_NORM
    return Part(role, start=start, offset=offset)


def _per_head(f: Findings, site: str, module: nn.Module) -> bool:
    """Is this norm applied to each head on its own, with one gain for all of them? Then it sees more rows than tokens."""
    given = f.trace.inputs[site]
    length = max(p.numel() for p in module.parameters(recurse=False))
    tokens = f.root.numel() // f.root.shape[-1]
    return given.dim() > f.root.dim() or given.numel() // length > tokens


def norm_offset(f: Findings, site: str, module: nn.Module, attribute: str) -> float:
    """0 if the norm multiplies by its weight, 1 if by 1 + weight: measured, since both go by the name RMSNorm."""
    gain = getattr(module, attribute)
    with torch.no_grad():
        saved = {n: p.detach().clone() for n, p in module.named_parameters()}
        for p in module.parameters():
            p.zero_()
        given = f.trace.inputs[site].detach()
        at_zero = module(given).abs().max().item()
        gain.fill_(1.0)
        at_one = module(given).abs().max().item()
        for n, p in module.named_parameters():
            p.copy_(saved[n])
    offset = at_zero / (at_one - at_zero) if at_one > at_zero else float("nan")
    if abs(offset - round(offset, 0)) > 1e-3 or round(offset) not in (0, 1):
        raise UserError(
            f"norm '{site}' ({type(module).__name__}) multiplies neither by its {attribute} nor by 1 + {attribute}",
            fix="use a norm with a plain gain, or give the parameter's role by name and start it yourself",
        )
    return float(round(offset))
