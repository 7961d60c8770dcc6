"""A specimen → its anatomy: find the roles of its parameters and prove them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from completep.anatomy.blocks import refuse_sharing, refuse_what_has_no_rule
from completep.anatomy.calls import Call
from completep.anatomy.proof import Proven, prove, randomise_
from completep.anatomy.roles import Anatomy, Dissection, Part, Site, assign, dissect, further_heads, width_axis
from completep.anatomy.specimen import guess_example
from completep.anatomy.trace import Example, recording
from completep.errors import UserError
from completep.rules.table import Role

LEAST_ENTRIES = 16  # so many random numbers do not have one sign


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
    randomise_(specimen)
    example = guess_example(specimen) if example is None else example
    dissection = dissect(specimen, example, writers)
    parts = assign(dissection, patterns or {}, constants, deliberate)
    heads = further_heads(dissection, parts)
    return _anatomy(dissection, parts, heads, prove(dissection, parts, heads, example))


def _is_one_sided(values: Tensor) -> bool:
    """True if a constructor chose where a bias starts, as Mamba's for its time steps. By chance it does not happen."""
    return len(values) >= LEAST_ENTRIES and bool((values > 0).all() or (values < 0).all())


def _anatomy(d: Dissection, parts: Mapping[str, Part], heads: Sequence[Call], proven: Proven) -> Anatomy:
    """What was found, in templates."""
    by_template: dict[str, Part] = {}
    for name, part in parts.items():
        first = by_template.setdefault(d.template(name), part)
        if first != part:
            raise _differs(d.template(name), first, part)
    _refuse_mixed_layouts(d)
    sites = [Site(d.template(w.site) if w.site else None, tuple(map(d.template, w.parameters))) for w in d.writers]
    tied = parts[d.readout.weight].role is Role.EMBEDDING
    return Anatomy(
        stacks=d.stacks,
        parts=by_template,
        branches=tuple(dict.fromkeys(sites)),
        readout=Site(d.readout.site, _readout_parameters(d, tied)),
        heads=tuple(Site(call.site, (f"{call.site}.weight",)) for call in heads),
        norms=frozenset(map(d.template, d.trace.norms)),
        tables=proven.scales,
        width=(d.readout.weight, width_axis(d)),
        specimen_width=d.root.shape[-1],
        final_norm=d.final_norms[0] if d.final_norms else None,
        stream_reader=d.stream_reader,
        tied=tied,
        unchecked=proven.unchecked,
        gates=frozenset(d.template(name) for w in d.writers for name in w.gates),
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


def _readout_parameters(d: Dissection, tied: bool) -> tuple[str, ...]:
    """What can hold the logit multiplier: the readout's matrix, or the last norm if the embeddings are tied."""
    if not tied:
        return (d.readout.weight,)
    vectors = d.trace.module(d.final_norms[0]).parameters(recurse=False) if d.final_norms else ()
    return tuple(d.trace.parameters[id(p)] for p in vectors)
