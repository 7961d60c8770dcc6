"""The coordinate check on one model, over a few real optimizer steps, at two levels:

*the stream*: the size of the residual stream before every block, of every branch and of the logits, and how far each
has moved since step 0;

*role by role*: the starting weights plus one role's accumulated update, and how far that alone moves the last stream
and the logits. This tells which rule is wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from completep.anatomy.trace import call, find_logits, first_tensor, given_tensor, stream_of
from completep.errors import UserError, some
from completep.measure.subject import Batch, Batches, Subject
from completep.rules.table import Role

SAMPLE = 16384  # entries kept of an activation to measure its change: accurate to 0.6 % at any model size

Note = Callable[[str, int, Tensor | None, float], None]  # quantity, layer, activation, factor


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
    """Train for a few steps and measure after each. Only the RMS and a bounded sample of an activation are kept."""
    refuse_randomness(subject, probe)
    start = [p.detach().clone() for p in subject.model.parameters()]
    first = observe(subject, probe)
    rows = []
    for step in range(steps + 1):
        now = first if step == 0 else observe(subject, probe)
        for (quantity, layer), seen in now.items():
            change = rms(seen.sample - first[quantity, layer].sample)
            rows.append(StreamRow(step, quantity, layer, seen.rms, change))
        if step < steps:
            subject.zero_grad()
            subject.loss(batches(step)).backward()  # type: ignore[no-untyped-call]
            subject.step()
    return rows, role_effects(subject, probe, start)


@dataclass(frozen=True)
class Observation:
    rms: float
    sample: Tensor


@torch.no_grad()
def observe(subject: Subject, probe: Batch) -> dict[tuple[str, int], Observation]:
    """One forward pass. Every measured activation is reduced as soon as it is computed."""
    observed: dict[tuple[str, int], Observation] = {}

    def note(quantity: str, layer: int, x: Tensor | None, factor: float = 1.0) -> None:
        if x is None:
            return
        flat = x.detach().flatten()
        sample = flat[sample_indices(len(flat)).to(flat.device)] if len(flat) > SAMPLE else flat
        observed[quantity, layer] = Observation(rms(x) * factor, sample.float().cpu() * factor)

    with watching(subject, note):
        output = call(subject.model, probe[0])
    note("logits", 0, find_logits(output))
    return observed


@contextmanager
def watching(subject: Subject, note: Note) -> Iterator[None]:
    """Hooks on every block (the stream before it), on every branch's last module, and on what reads the last stream."""
    anatomy = subject.anatomy
    handles: list[torch.utils.hooks.RemovableHandle] = []
    writers = {site.module for site in anatomy.branches if site.module}
    blocks = 0

    def before(module: nn.Module, layer: int) -> None:
        def hook(module: nn.Module, args: object, kwargs: object) -> None:
            note("stream", layer, given_tensor(args, kwargs), 1.0)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(module: nn.Module, quantity: str, layer: int, factor: float) -> None:
        def hook(module: nn.Module, args: object, output: object) -> None:
            note(quantity, layer, first_tensor(output), factor)

        handles.append(module.register_forward_hook(hook, prepend=True))  # before any multiplier's own hook

    for name, module in subject.model.named_modules():
        if any(stack.pattern.fullmatch(name) for stack in anatomy.blocks):
            before(module, blocks)
            blocks += 1
        elif anatomy.template(name) in writers:
            outside = subject.forward.sites[name] / subject.forward.inside.get(name, 1.0)
            after(module, f"branch {anatomy.template(name)}", blocks - 1, outside)
    last = subject.model.get_submodule(anatomy.tap.module(subject.model))
    if anatomy.tap.returned:
        after(last, "stream", blocks, 1.0)
    else:
        before(last, blocks)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def role_effects(subject: Subject, probe: Batch, start: list[Tensor]) -> list[RoleRow]:
    """For each role: the starting weights with only that role's update."""
    parameters = list(subject.model.parameters())
    end = {id(p): p.detach().clone() for p in parameters}
    begin = {id(p): value for p, value in zip(parameters, start, strict=True)}
    for p in parameters:
        p.copy_(begin[id(p)])
    stream, logits = last_stream_and_logits(subject, probe)
    rows = []
    for role, owned in subject.roles().items():
        for p in owned:
            p.copy_(end[id(p)])
        moved_stream, moved_logits = last_stream_and_logits(subject, probe)
        rows.append(RoleRow(role, rms(moved_stream - stream), rms(moved_logits - logits)))
        for p in owned:
            p.copy_(begin[id(p)])
    return rows


def last_stream_and_logits(subject: Subject, probe: Batch) -> tuple[Tensor, Tensor]:
    stream, output = stream_of(subject.model, subject.anatomy.tap, probe[0])
    logits = find_logits(output)
    assert logits is not None  # the model was examined: it returns logits
    return stream.clone(), logits


@torch.no_grad()
def refuse_randomness(subject: Subject, probe: Batch) -> None:
    """Two passes of one model over one batch must agree. Otherwise every measured change is noise."""
    one, two = (last_stream_and_logits(subject, probe)[1] for _ in range(2))
    if not torch.equal(one.nan_to_num(), two.nan_to_num()):
        drops = [n for n, m in subject.model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
        who = f": dropout is on in {some(drops)}" if drops else ""
        raise UserError(
            f"the model's forward is not deterministic{who}: two passes over one batch differ by {rms(one - two):.2g}",
            fix="build it with dropout 0, or switch off whatever draws random numbers in forward",
        )


def sample_indices(size: int) -> Tensor:
    return torch.randint(size, (SAMPLE,), generator=torch.Generator().manual_seed(size))


def rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()
