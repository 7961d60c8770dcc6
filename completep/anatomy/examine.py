"""A specimen → its anatomy: find the roles of its parameters and prove them."""

from collections.abc import Mapping, Sequence

from torch import nn

from completep.anatomy.blocks import refuse_sharing, refuse_what_has_no_rule
from completep.anatomy.proof import prove, randomise_
from completep.anatomy.roles import Anatomy, Dissection, Part, Site, assign, dissect, width_axis
from completep.anatomy.specimen import guess_example
from completep.anatomy.trace import Example
from completep.errors import UserError
from completep.rules.table import Role


def examine(
    specimen: nn.Module,
    *,
    example: Example | None = None,
    patterns: Mapping[str, Role] | None = None,
    writers: Sequence[str] | None = None,
) -> Anatomy:
    """Find and prove the roles of a model that can be run. This overwrites the weights of the specimen.

    The specimen is run twice, and then twice for each kind of branch: six times for attention and MLP branches.
    """
    refuse_what_has_no_rule(specimen)
    refuse_sharing(specimen)
    vectors = {n: p for n, p in specimen.named_parameters() if p.dim() == 1}
    constants = {n: p[0].item() for n, p in vectors.items() if (p == p[0]).all()}
    randomise_(specimen)
    example = guess_example(specimen) if example is None else example
    dissection = dissect(specimen, example, writers)
    parts = assign(dissection, patterns or {}, constants)
    return _anatomy(dissection, parts, prove(dissection, parts, example))


def _anatomy(d: Dissection, parts: Mapping[str, Part], scales: Mapping[str, float]) -> Anatomy:
    """What was found, in templates."""
    by_template: dict[str, Part] = {}
    for name, part in parts.items():
        first = by_template.setdefault(d.template(name), part)
        if first != part:
            what = f"'{d.template(name)}' is a {first.role} in one block and a {part.role} in another"
            raise UserError(what, fix="use the same layout in all blocks of a stack, or name its role: roles={...}")
    sites = [Site(d.template(w.site) if w.site else None, tuple(map(d.template, w.parameters))) for w in d.writers]
    tied = parts[d.readout.weight].role is Role.EMBEDDING
    return Anatomy(
        stacks=d.stacks,
        parts=by_template,
        branches=tuple(dict.fromkeys(sites)),
        readout=Site(d.readout.site, _readout_parameters(d, tied)),
        tables=scales,
        width=(d.readout.weight, width_axis(d)),
        specimen_width=d.root.shape[-1],
        final_norm=d.final_norms[0] if d.final_norms else None,
        stream_reader=d.stream_reader,
        tied=tied,
    )


def _readout_parameters(d: Dissection, tied: bool) -> tuple[str, ...]:
    """What can hold the logit multiplier: the readout's matrix, or the last norm if the embeddings are tied."""
    if not tied:
        return (d.readout.weight,)
    vectors = d.trace.module(d.final_norms[0]).parameters(recurse=False) if d.final_norms else ()
    return tuple(d.trace.parameters[id(p)] for p in vectors)
