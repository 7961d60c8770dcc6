"""From a model to its anatomy: choose a specimen, run it, name its parts, prove them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from completep.errors import UserError, some
from completep.rules import anatomy, proof, roles
from completep.rules.roles import Anatomy, Findings, Part, Site
from completep.rules.table import Role

LARGEST_SPECIMEN = 300_000_000  # parameters; 1.2 GB in float32

Factory = Callable[[], nn.Module]


def build(factory: Factory, device: str) -> nn.Module:
    """Call the user's factory on a device, without moving her random state."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            model = factory()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the factory failed on the {device} device: {type(error).__name__}: {error}",
            fix="call it by itself to see the whole trace",
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"the factory returned {type(model).__name__}, not an nn.Module",
            fix="base=lambda: MyModel(width=…, depth=…)",
        )
    return model


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def choose_specimen(
    model: nn.Module, base: nn.Module | None, factory: Factory | None, given: "Factory | nn.Module | None"
) -> nn.Module:
    """The smallest model with this structure that can be run: the user's own choice, the base, or a copy of the model."""
    if isinstance(given, nn.Module):
        found = copy.deepcopy(given)
    elif given is not None:
        if not callable(given):
            raise UserError(
                f"specimen={given!r} is neither a model nor a factory", fix="specimen=lambda: <the same class, small>"
            )
        found = _build_small(given)
    elif factory is not None and base is not None and size(base) <= LARGEST_SPECIMEN:
        found = build(factory, "cpu")
    elif not on_meta(model) and size(model) <= LARGEST_SPECIMEN:
        found = copy.deepcopy(model)
    else:
        why = "is on the meta device" if on_meta(model) else f"has {size(model):,} parameters"
        raise UserError(
            f"nothing small enough to examine: the model {why}, and the base is "
            + ("as large" if factory else "only a Shape"),
            fix="pass specimen=lambda: <the same class, small>; its parts are found and proven on real numbers",
        )
    return found.to(device="cpu", dtype=torch.float32).eval().requires_grad_(True)


def _build_small(factory: Factory) -> nn.Module:
    try:
        parameters = size(build(factory, "meta"))
    except UserError:
        parameters = 0  # it cannot be built on meta; then let it show its size by itself
    if parameters > LARGEST_SPECIMEN:
        raise UserError(
            f"the model to examine has {parameters:,} parameters, more than {LARGEST_SPECIMEN:,}",
            fix="give a factory for the base (on the command line: --base width=… depth=…), or a smaller specimen",
        )
    return build(factory, "cpu")


def guess_example(model: nn.Module) -> Any:
    """Inputs to run the specimen on, where the user gave none: token ids, or an image."""
    generator = torch.Generator().manual_seed(0)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if tables:
        safe = min(m.num_embeddings for m in tables)  # whichever table the ids index, they fit
        return torch.randint(safe, (2, 8), generator=generator)
    images = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    side = _image_side(model)
    if images and side:
        return torch.randn(2, images[0].in_channels, side, side, generator=generator)
    raise UserError(
        "I cannot guess what this model takes as input",
        fix="pass example=<inputs>: a tensor, a tuple of arguments, or a dict",
    )


def _image_side(model: nn.Module) -> int | None:
    places = [model, getattr(model, "config", None), getattr(model, "patch_embed", None)]
    for place in places:
        for attribute in ("image_size", "img_size"):
            value = getattr(place, attribute, None)
            value = value[0] if isinstance(value, (tuple, list)) else value
            if isinstance(value, int):
                return value
    return None


def examine(
    specimen: nn.Module,
    *,
    example: Any = None,
    patterns: "Mapping[str, Role] | None" = None,
    writers: "list[str] | None" = None,
) -> Anatomy:
    """Find and prove the parts of a model that can be run. Changes its weights."""
    anatomy.refuse_what_has_no_rule(specimen)
    refuse_sharing(specimen)
    constants = {
        n: p.flatten()[0].item() for n, p in specimen.named_parameters() if p.dim() == 1 and (p == p.flatten()[0]).all()
    }
    proof.randomise_(specimen)
    example = guess_example(specimen) if example is None else example
    try:
        with torch.no_grad():
            anatomy.call(specimen, example)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"forward failed on the example input: {type(error).__name__}: {error}",
            fix="pass example=<inputs that forward takes>: a tensor, a tuple of arguments, or a dict",
        ) from error
    findings = roles.dissect(specimen, example, writers)
    parts = roles.assign(findings, patterns or {}, constants)
    return _in_templates(findings, parts, proof.prove(findings, parts, example))


def refuse_sharing(model: nn.Module) -> None:
    """One tensor in two blocks would be stepped for both: its gradient sums over depth, and no rule covers that."""
    stacks = anatomy.find_stacks(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        if len(shared) > 1 and any(s.pattern.match(n) for s in stacks for n in shared):
            raise UserError(
                f"one parameter is shared inside the blocks: {some(shared)}",
                fix="give every block its own parameters; only embedding and unembedding may be tied",
            )


def _in_templates(f: Findings, parts: dict[str, Part], scales: dict[str, float]) -> Anatomy:
    by_template: dict[str, Part] = {}
    for name, part in parts.items():
        known = by_template.setdefault(f.template(name), part)
        if known != part:
            raise UserError(
                f"'{f.template(name)}' is a {known.role} in one block and a {part.role} in another",
                fix="blocks of one stack must be alike, or say which: roles={...}",
            )
    branches = {
        Site(f.template(w.site) if w.site else None, tuple(map(f.template, w.parameters))): None for w in f.writers
    }
    tied = parts[f.readout.weight].role is Role.EMBEDDING
    return Anatomy(
        stacks=f.stacks,
        parts=by_template,
        branches=tuple(branches),
        readout=Site(f.readout.site, _readout_folds_into(f, tied)),
        tables=scales,
        width=(f.readout.weight, roles.width_axis(f)),
        specimen_width=f.root.shape[-1],
        final_norm=f.final_norms[0] if f.final_norms else None,
        stream_reader=f.stream_reader,
        tied=tied,
    )


def _readout_folds_into(f: Findings, tied: bool) -> tuple[str, ...]:
    """The readout's own matrix; the last norm's gain and bias where that matrix is also the embedding."""
    if not tied:
        return (f.readout.weight,)
    if not f.final_norms:
        return ()
    norm = f.trace.model.get_submodule(f.final_norms[0])
    return tuple(f.trace.parameters[id(p)] for p in norm.parameters(recurse=False))
