"""Coordinate check, at two levels, on one model: over a few real optimizer steps,

*the stream*: how large the residual stream is after every block, each branch's contribution, the logits, and how far each
has moved since step 0;

*role by role*: only one role's accumulated update applied to the starting weights, and how far that alone moves the last
stream and the logits. This is what tells which rule is wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from completep.errors import UserError
from completep.measure.subject import Batch, Batches, Subject
from completep.rules.anatomy import call, find_logits, first_tensor
from completep.rules.table import Role

SAMPLE = (
    16384  # entries of an activation that are kept to tell its change by: 0.6 % accurate, whatever the model's size
)


@dataclass(frozen=True)
class StreamRow:
    step: int
    quantity: str  # stream, logits, or "branch" and the module that writes it
    layer: int  # blocks before it
    rms: float
    change: float  # RMS of the difference to step 0


@dataclass(frozen=True)
class RoleRow:
    role: Role
    stream: float  # RMS of how far this role's update alone moves the last stream
    logits: float


def measure(subject: Subject, batches: Batches, probe: Batch, steps: int) -> tuple[list[StreamRow], list[RoleRow]]:
    """Train for a few steps, and measure. Of an activation, its RMS and a bounded sample are kept, however large it is."""
    refuse_noise(subject, probe)
    start = [p.detach().clone() for p in subject.model.parameters()]
    first = observe(subject, probe)
    rows = []
    for step in range(steps + 1):
        now = first if step == 0 else observe(subject, probe)
        for (quantity, layer), seen in now.items():
            change = rms(seen.sample - first[quantity, layer].sample)
            rows.append(StreamRow(step, quantity, layer, seen.rms, change))
        if step < steps:
            subject.optimizer.zero_grad()
            subject.loss(batches(step)).backward()  # type: ignore[no-untyped-call]
            subject.optimizer.step()
    return rows, role_effects(subject, probe, start)


@dataclass(frozen=True)
class Seen:
    rms: float
    sample: Tensor


@torch.no_grad()
def observe(subject: Subject, probe: Batch) -> dict[tuple[str, int], Seen]:
    """One forward pass; everything that is measured in it, reduced as it passes."""
    found: dict[tuple[str, int], Seen] = {}

    def note(quantity: str, layer: int, x: Tensor | None, factor: float = 1.0) -> None:
        if x is not None:
            kept = x.detach().flatten()
            kept = kept[_entries(len(kept)).to(kept.device)].float().cpu() if len(kept) > SAMPLE else kept.float().cpu()
            found[quantity, layer] = Seen(rms(x) * factor, kept * factor)

    with watching(subject, note):
        output = call(subject.model, probe[0])
    note("logits", 0, find_logits(output))
    return found


@contextmanager
def watching(subject: Subject, note: Any) -> Iterator[None]:
    """Hooks on every block (the stream before it), every branch's last module, and what reads the last stream."""
    anatomy, handles = subject.anatomy, []
    writers = {site.module for site in anatomy.branches if site.module}
    blocks = 0

    def before(layer: int) -> Any:
        return lambda module, args, kwargs: note("stream", layer, _given(args, kwargs))

    def after(quantity: str, layer: int, factor: float) -> Any:
        return lambda module, args, output: note(quantity, layer, first_tensor(output), factor)

    for name, module in subject.model.named_modules():
        if any(stack.pattern.fullmatch(name) for stack in anatomy.stacks):
            handles.append(module.register_forward_pre_hook(before(blocks), with_kwargs=True))
            blocks += 1
        elif anatomy.template(name) in writers:
            hook = after(f"branch {anatomy.template(name)}", blocks - 1, subject.branch_factors[name])
            handles.append(module.register_forward_hook(hook, prepend=True))  # before any multiplier's own hook
    reader = subject.model.get_submodule(anatomy.stream_reader)
    handles.append(reader.register_forward_pre_hook(before(blocks), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def role_effects(subject: Subject, probe: Batch, start: list[Tensor]) -> list[RoleRow]:
    """For each role: the starting weights, with that role's update alone."""
    parameters = list(subject.model.parameters())
    end = [p.detach().clone() for p in parameters]
    for parameter, value in zip(parameters, start, strict=True):
        parameter.copy_(value)
    starts, ends = ({id(p): v for p, v in zip(parameters, values, strict=True)} for values in (start, end))
    stream, logits = last_stream_and_logits(subject, probe)
    rows = []
    for role, owned in subject.roles().items():
        for p in owned:
            p.copy_(ends[id(p)])
        moved, said = last_stream_and_logits(subject, probe)
        rows.append(RoleRow(role, rms(moved - stream), rms(said - logits)))
        for p in owned:
            p.copy_(starts[id(p)])
    return rows


def last_stream_and_logits(subject: Subject, probe: Batch) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(_given(args, kwargs))  # type: ignore[arg-type]

    reader = subject.model.get_submodule(subject.anatomy.stream_reader)
    handle = reader.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        output = call(subject.model, probe[0])
    finally:
        handle.remove()
    return seen[0].clone(), find_logits(output)  # type: ignore[return-value]


@torch.no_grad()
def refuse_noise(subject: Subject, probe: Batch) -> None:
    """Two passes of one model over one batch must agree, or every change measured is noise."""
    one, two = (last_stream_and_logits(subject, probe)[1] for _ in range(2))
    if not torch.equal(one.nan_to_num(), two.nan_to_num()):
        drops = [n for n, m in subject.model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
        who = f": dropout is on in {drops[0]} and {len(drops) - 1} more places" if drops else ""
        raise UserError(
            f"the model's forward is not deterministic{who}: it gives {rms(one - two):.2g} (RMS) between two passes over one batch",
            fix="build it with dropout 0, or whatever draws random numbers in forward switched off",
        )


def _given(args: Any, kwargs: Any) -> Tensor | None:
    found = first_tensor(args)
    return found if found is not None else first_tensor(kwargs)


def _entries(size: int) -> Tensor:
    return torch.randint(size, (SAMPLE,), generator=torch.Generator().manual_seed(size))


def rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()
