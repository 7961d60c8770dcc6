"""Which multipliers a model's forward pass really has, measured: the model may put them anywhere it likes."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from completep.rules import proof
from completep.rules.anatomy import call, first_tensor, logits_of
from completep.rules.examine import guess_example
from completep.rules.roles import Anatomy


class Probe:
    """Adds a zero that remembers: its gradient tells how much of what passes here arrives."""

    def __init__(self) -> None:
        self.zero: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        first = output if isinstance(output, Tensor) else output[0]
        self.zero = torch.zeros_like(first, requires_grad=True)
        return first + self.zero if isinstance(output, Tensor) else (first + self.zero, *output[1:])


def own_factors(model: nn.Module, found: Anatomy, example: Any = None) -> dict[str, float]:
    """Factor from each branch site (by its module) into the stream, and from the readout's product into the logits."""
    return _measure(model, found, example)[0]


def own_tables(model: nn.Module, found: Anatomy, example: Any = None) -> dict[str, float]:
    """Factor from each embedding (by its weight) into the stream."""
    return _measure(model, found, example)[1]


def _measure(model: nn.Module, found: Anatomy, example: Any) -> tuple[dict[str, float], dict[str, float]]:
    """With every writer at zero, nothing reaches the stream but embeddings and what a probe adds. Works on a copy."""
    model = copy.deepcopy(model).to(device="cpu", dtype=torch.float32).eval().requires_grad_(True)
    proof.randomise_(model)
    with torch.no_grad():
        model.get_parameter(found.width[0]).mul_(1e-2)  # small logits, where a soft-cap does nothing
    proof.set_writers_(model, _writers_at_zero(model, found))
    sites = {b.module for b in found.branches if b.module}
    probes = {n: Probe() for n, _ in model.named_modules() if found.template(n) in sites}
    seen: dict[str, Tensor] = {}
    handles = [model.get_submodule(n).register_forward_hook(p, prepend=True) for n, p in probes.items()]
    handles.append(
        model.get_submodule(found.stream_reader).register_forward_pre_hook(_keep(seen, "stream"), with_kwargs=True)
    )
    if found.readout.module:
        readout = model.get_submodule(found.readout.module)
        handles.append(readout.register_forward_pre_hook(_keep(seen, "read"), with_kwargs=True, prepend=True))
    if found.final_norm:
        handles.append(
            model.get_submodule(found.final_norm).register_forward_hook(lambda m, a, o: seen.update(normed=o))
        )
    with torch.enable_grad():
        logits = logits_of(call(model, guess_example(model) if example is None else example))
    for handle in handles:
        handle.remove()
    factors = _branch_factors(seen["stream"], probes) | _logit_factor(model, found, logits, seen)
    return factors, _table_factors(model, found, seen["stream"])


def _writers_at_zero(model: nn.Module, found: Anatomy) -> dict[str, float]:
    writers = {p for b in found.branches for p in b.parameters}
    named = ((name, found.template(name)) for name, _ in model.named_parameters())
    return {name: -found.parts[template].offset for name, template in named if template in writers}


def _keep(seen: dict[str, Tensor], key: str) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = first_tensor(args)
        seen[key] = tensor if tensor is not None else first_tensor(kwargs)  # type: ignore[assignment]

    return hook


def _branch_factors(root: Tensor, probes: dict[str, Probe]) -> dict[str, float]:
    """How much of a probe's unit arrives in the stream; pooling before the final norm shares it out over the tokens."""
    zeros = [p.zero for p in probes.values() if p.zero is not None]
    grads = torch.autograd.grad(root.sum(), zeros, retain_graph=True) if zeros else ()
    return {n: g.sum().item() / root.numel() for n, g in zip(probes, grads, strict=True)}


def _table_factors(model: nn.Module, found: Anatomy, root: Tensor) -> dict[str, float]:
    weights = {name: model.get_parameter(name) for name in found.tables}
    grads = torch.autograd.grad(root.sum(), list(weights.values()), allow_unused=True) if weights else ()
    return {n: 0.0 if g is None else g.sum().item() / root.numel() for n, g in zip(weights, grads, strict=True)}


def _logit_factor(model: nn.Module, found: Anatomy, logits: Tensor, seen: dict[str, Tensor]) -> dict[str, float]:
    """Logits against the plain product of the readout with the normed stream, wherever between them the factor stands."""
    if not found.readout.module:
        return {}
    module = model.get_submodule(found.readout.module)
    given = seen.get("normed", seen["read"])
    given = (
        given if given.shape[:-1] == logits.shape[:-1] else seen["read"]
    )  # pooled in between: look at the readout alone
    with torch.no_grad():
        bias = type(module).forward(module, torch.zeros_like(given))
        product = type(module).forward(module, given) - bias
        return {found.readout.module: projection(logits - bias, product)}


def projection(value: Tensor, unit: Tensor) -> float:
    """The factor k of the best value ≈ k · unit."""
    return (value.flatten() @ unit.flatten() / unit.square().sum()).item()
