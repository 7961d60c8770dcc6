"""The multipliers that a forward pass already contains, measured: the model may apply them anywhere."""

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from completep.anatomy.proof import randomise_, set_parameters_
from completep.anatomy.roles import Anatomy
from completep.anatomy.specimen import Base, guess_example, runnable
from completep.anatomy.trace import Example, call, inputs_kept, logits_of


@dataclass(frozen=True)
class ForwardFactors:
    """What the model multiplies by itself."""

    sites: dict[str, float]  # module at the end of a branch → into the stream; readout module → into the logits
    tables: dict[str, float]  # embedding weight → into the stream


class Probe:
    """Forward hook that adds zeros to the output. Their gradient shows how much of the output arrives elsewhere."""

    def __init__(self) -> None:
        self.zeros: Tensor | None = None

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        first, *rest = output if isinstance(output, (tuple, list)) else (output,)
        self.zeros = torch.zeros_like(first, requires_grad=True)
        return first + self.zeros if isinstance(output, Tensor) else (first + self.zeros, *rest)


def measure_forward(model: nn.Module, anatomy: Anatomy, example: Example | None = None) -> ForwardFactors:
    """Run a copy of the model once. With all writers at zero, only embeddings and probes reach the stream."""
    model = runnable(copy.deepcopy(model))
    randomise_(model)
    with torch.no_grad():
        model.get_parameter(anatomy.width[0]).mul_(1e-2)  # small logits, where a soft-cap does nothing
    set_parameters_(model, _zero_writers(model, anatomy))
    ends = {b.module for b in anatomy.branches if b.module}
    probes = {n: Probe() for n, _ in model.named_modules() if anatomy.template(n) in ends}
    for name, probe in probes.items():
        model.get_submodule(name).register_forward_hook(probe, prepend=True)  # before a multiplier's own hook
    normed: list[Tensor] = []
    if anatomy.final_norm:
        model.get_submodule(anatomy.final_norm).register_forward_hook(lambda m, args, output: normed.append(output))
    kept_sites = {anatomy.stream_reader, anatomy.readout.module or anatomy.stream_reader}
    with torch.enable_grad(), inputs_kept(model, *kept_sites) as kept:
        logits = logits_of(call(model, guess_example(model) if example is None else example))
    stream = kept[anatomy.stream_reader]
    zeros = {name: probe.zeros for name, probe in probes.items() if probe.zeros is not None}
    sites = _arriving(stream, zeros)
    if anatomy.readout.module:
        readout_input = kept[anatomy.readout.module]
        candidates = [x for x in normed[-1:] if x.shape[:-1] == logits.shape[:-1]]  # otherwise the model pools between
        x = candidates[0] if candidates else readout_input
        sites[anatomy.readout.module] = _logit_factor(model.get_submodule(anatomy.readout.module), x, logits)
    return ForwardFactors(sites, _arriving(stream, {name: model.get_parameter(name) for name in anatomy.tables}))


def _zero_writers(model: nn.Module, anatomy: Anatomy) -> dict[str, float]:
    writers = {p for b in anatomy.branches for p in b.parameters}
    names = [name for name, _ in model.named_parameters() if anatomy.template(name) in writers]
    return {name: -anatomy.part(name).offset for name in names}


def _arriving(stream: Tensor, sources: dict[str, Tensor]) -> dict[str, float]:
    """How much of a unit added at each source arrives in the stream. Pooling divides it among the tokens."""
    tensors = list(sources.values())
    grads = torch.autograd.grad(stream.sum(), tensors, retain_graph=True, allow_unused=True) if tensors else ()
    return {n: 0.0 if g is None else g.sum().item() / stream.numel() for n, g in zip(sources, grads, strict=True)}


@torch.no_grad()
def _logit_factor(readout: nn.Module, x: Tensor, logits: Tensor) -> float:
    """Logits relative to the plain product of the readout with the normed stream."""
    bias = type(readout).forward(readout, torch.zeros_like(x))
    product = type(readout).forward(readout, x) - bias
    return float((logits - bias).flatten() @ product.flatten() / product.square().sum())  # least squares


class OwnFactors:
    """The factors of a model and of its base. Each is measured when it is first needed, and only once."""

    def __init__(self, model: nn.Module, base: Base, anatomy: Anatomy, example: Example | None) -> None:
        self.model, self.base, self.anatomy, self.example = model, base, anatomy, example

    @cached_property
    def here(self) -> ForwardFactors:
        with torch.device("cpu"):
            return measure_forward(self.model, self.anatomy, self.example)

    @cached_property
    def at_base(self) -> ForwardFactors | None:
        """By template; None if the base is only a Shape."""
        if self.base.real is None:
            return None
        with torch.device("cpu"):
            factors = measure_forward(self.base.real, self.anatomy, self.example)
        return ForwardFactors({self.anatomy.template(n): f for n, f in factors.sites.items()}, factors.tables)
