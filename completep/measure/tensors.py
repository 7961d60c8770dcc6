"""What one backward pass and one optimizer step say about every parameter tensor of a model.

For a template p (the same parameter in all blocks together), with its learning rate η, epsilon ε and weight decay λ:

    gain       RMS(output) / RMS(input) of the module that holds p, into the stream or the logits where it writes there
    pull       -Σ g·Δp, where Δp is the optimizer's own first step: by how much p's step lowers the loss, to first order
    eps ratio  ε / RMS(g)
    decay      η·λ, the shrinkage per step

Under right rules, gains follow the forward rules and the other three do not depend on the size of the model. A single
backward pass gives them per tensor with a standard error of 0.01 to 0.03 in the exponent.

The gradient of a gain or bias is a sum over tokens and, for QK norms, over heads. At init the terms cancel in part, and
in training they align. So its terms are added up without their signs: the scaling is that of the aligned gradient, and
there is far less noise.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from completep import paper
from completep.anatomy.kinds import is_convolution, is_linear
from completep.anatomy.trace import find_logits, first_tensor, given_tensor, stream_of
from completep.measure.bare import BareGradients
from completep.measure.conditions import ConditionGradients
from completep.measure.coordinates import rms
from completep.measure.optimizers import AdamW
from completep.measure.outputs import PartRow, SplitOutputs
from completep.measure.subject import Batch, Batches, Subject
from completep.rules.multipliers import ScaleOutput
from completep.rules.table import RANDOM_SUM, Column, Role

Parts = list[tuple[int, float]]  # (size, pull) of the parts of a matrix's outputs
TIED = "(tied)"  # ends the name of a tied readout
ROUNDS = 3  # zero-initialised factors that may hide each other's gradients
FEW_OUTPUTS = 64  # below, the output of a readout has too few independent numbers to average over
SIGNED_ROWS = 512
NO_EPS = 1e-30  # ε while the pull is measured: the step then shows the learning rate alone


@dataclass(frozen=True)
class TensorRow:
    """One template at one size. None: it does not apply, or it cannot be seen.

    The expected values are the reference rules' factors on the values at the base.
    """

    template: str
    role: Role
    column: Column  # of its optimizer
    lr: float
    pull: float | None
    expected_lr: float
    eps: float | None
    eps_ratio: float | None
    expected_eps: float
    decay: float | None
    expected_decay: float
    gain: float | None
    expected_gain: float
    expected_std: float  # the parts of it
    expected_multiplier: float
    spread: float | None  # how far one block is from the others, in gain or in a setting
    lag: float = 1.0  # how much more the model's width has grown than its output, in any unit
    late: bool = False  # it has a gradient only after what starts at zero has moved
    drawn: bool = False  # its starting values are drawn with a size that the rules choose
    kept: bool = False  # it keeps the starting values of its constructor, which no rule judges
    idle: int = 0  # experts that routing sent nothing to


@dataclass(frozen=True)
class State:
    """The model as it starts: RMS of the stream after the last block, and of the logits."""

    stream: float
    logits: float


@torch.no_grad()
def measure_start(subject: Subject, batch: Batch) -> tuple[State, dict[str, float]]:
    """(the stream and the logits at init, the gain of every parameter that has one)."""
    ratios: dict[str, float] = {}
    normed: list[Tensor] = []
    norms = [subject.model.get_submodule(name) for name in (subject.anatomy.final_norm,) if name is not None]
    watched = [norm.register_forward_hook(lambda module, args, y: normed.append(y)) for norm in norms]
    with _ratios_kept(subject, ratios), _hooks(watched):
        stream, output = stream_of(subject.model, subject.anatomy.tap, batch[0])
    logits = find_logits(output)
    assert logits is not None  # the model was examined: it returns logits
    gain_of = gains(subject, ratios)
    if subject.anatomy.tied and (factor := _tied_factor(subject, normed, logits)):
        # The input holds the same embeddings, so the output of the table is not a random sum.
        table = subject.model.get_parameter(subject.anatomy.readout.weight).detach()
        gain_of[tied_readout(subject)] = rms(table) * table.shape[-1] ** 0.5 * factor
    return State(rms(stream), rms(logits)), gain_of


def _tied_factor(subject: Subject, normed: list[Tensor], logits: Tensor) -> float | None:
    """What multiplies the product of a tied table with the output of the final norm; None if it cannot be measured."""
    readout = subject.anatomy.readout
    if readout.module is not None:
        return abs(subject.forward.sites[readout.module])
    table = subject.model.get_parameter(readout.weight).detach()
    if not normed or normed[-1].shape != (*logits.shape[:-1], table.shape[-1]) or len(table) != logits.shape[-1]:
        return None
    product = (normed[-1] @ table.T).flatten()
    return abs(float(logits.flatten() @ product / product.square().sum()))


@torch.no_grad()
def branch_share(subject: Subject, batch: Batch) -> float:
    """ρ: what all branches add to the stream, relative to the stream without them, as RMS over tokens of the ratio.

    Tokens count alike: a class token may start much smaller than the others. The weights are restored.
    """
    site = subject.anatomy.tap
    whole = stream_of(subject.model, site, batch[0])[0].clone()
    writers = {n: p for n, p in subject.parameters.items() if subject.anatomy.template(n) in subject.writers}
    start = {name: p.detach().clone() for name, p in writers.items()}
    scale_(subject, lambda template: 0.0 if template in subject.writers else 1.0)
    entry = stream_of(subject.model, site, batch[0])[0].clone()
    _set(subject, start)
    sizes, added = entry.norm(dim=-1), (whole - entry).norm(dim=-1)
    seen = sizes > 0  # the row of a padding token is zero
    return rms(added[seen] / sizes[seen])


@contextmanager
def _hooks(handles: list[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ratios_kept(subject: Subject, kept: dict[str, float]) -> AbstractContextManager[None]:
    """RMS(output - bias) / RMS(input) of every linear layer and convolution, by module name."""
    readouts = {outlet.module for outlet in subject.anatomy.outlets}

    def watch(name: str) -> Callable[[nn.Module, object, object, object], None]:
        def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            x, y = given_tensor(args, kwargs), first_tensor(output)
            if x is None or y is None:
                return
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                y = y - (bias.view(-1, *[1] * (y.dim() - 2)) if is_convolution(module) else bias)
            if name in readouts and is_linear(module) and y.shape[-1] < FEW_OUTPUTS:
                x = _with_random_signs(x)
                y = module.forward(x) - (bias if isinstance(bias, Tensor) else 0.0)
            kept[name] = rms(y) / max(rms(x), 1e-30)

        return hook

    return _hooks(
        [
            module.register_forward_hook(watch(name), with_kwargs=True, prepend=True)  # before any multiplier's hook
            for name, module in subject.layout.products.items()
        ]
    )


def _with_random_signs(x: Tensor) -> Tensor:
    """The rows of an input again and again, each time with other signs: as large as before, and uncorrelated.

    The rows of the last norm are often almost the same, so a readout with few outputs makes few independent numbers of
    them. Signs change no expectation: weights that are drawn are as likely with the other sign.
    """
    rows = x.flatten(0, -2)
    rows = rows.repeat(math.ceil(SIGNED_ROWS / len(rows)), 1)
    signs = torch.randint(2, rows.shape, generator=torch.Generator().manual_seed(0))
    return rows * (2 * signs - 1).to(rows)


def gains(subject: Subject, ratios: Mapping[str, float]) -> dict[str, float]:
    """The gain of every parameter: of its module if that is a product, else the RMS of its own entries.

    What follows in the forward pass is part of it: the branch multiplier of a writer, the logit multiplier, the factor
    on an embedding. A parameter that starts at zero has none.
    """
    anatomy = subject.anatomy
    gain_of: dict[str, float] = {}
    for name, parameter in subject.parameters.items():
        part, (owner, _, attribute) = anatomy.part(name), name.rpartition(".")
        entries = parameter.detach() + part.offset if part.offset else parameter.detach()
        if part.role.trait.fan == "model":  # a table looks its rows up, the others sum over their inputs
            gain = rms(entries)
        elif attribute == "weight" and owner in ratios:
            gain = ratios[owner]
        else:
            gain = rms(entries) * math.prod(parameter.shape[axis] for axis in part.fan_in) ** 0.5
        inside = abs(subject.forward.inside.get(owner, 1.0)) if owner in subject.forward.sites else 1.0
        gain_of[name] = gain * subject.factor(name) / inside
    return {name: gain for name, gain in gain_of.items() if gain > 0}


def tied_readout(subject: Subject) -> str:
    """A name for the second use of a tied table."""
    readout = subject.anatomy.readout
    return f"{readout.weight if readout.module is None else f'{readout.module}.weight'} {TIED}"


def scale_(subject: Subject, factor: Callable[[str], float]) -> None:
    """Multiply every parameter by the factor of its template, in the coordinates w + offset."""
    with torch.no_grad():
        for name, parameter in subject.parameters.items():
            c = factor(subject.anatomy.template(name))
            if c != 1.0:
                parameter.mul_(c)
            if c != 1.0 and (offset := subject.anatomy.part(name).offset):
                parameter.add_((c - 1) * offset)


@torch.no_grad()
def repeat_starts_(subject: Subject, starts: Mapping[str, Sequence[Tensor]]) -> None:
    """Give parameters that keep their constructor's values those of the base, repeated along the axis that grows.

    A few random decays differ much from model to model, and the largest of them dominate a gradient. With the same
    values at every size, only the size is compared.
    """
    seen: dict[str, int] = {}
    for name, parameter in subject.parameters.items():
        template = subject.anatomy.template(name)
        if (values := starts.get(template)) and parameter.dim():
            start = values[seen.setdefault(template, 0) % len(values)]
            seen[template] += 1
            times = [math.ceil(n / b) for n, b in zip(parameter.shape, start.shape, strict=True)]
            parameter.copy_(start.repeat(times)[tuple(slice(n) for n in parameter.shape)])


def measure_tensors(subject: Subject, batch: Batch, gain: Mapping[str, float]) -> tuple[list[TensorRow], list[PartRow]]:
    """One backward pass and one step of the subject's optimizer. The weights are the starting ones afterwards.

    The second list is of matrices whose outputs are split, if the first backward pass reaches them.
    """
    first = _first_step(subject, batch)
    pulls, squares, steps = first.pulls, first.squares, first.steps
    late: set[str] = set()
    moved: dict[str, Tensor] = {}
    for _ in range(ROUNDS):
        still = {name for name, square in squares.items() if square == 0}
        zero = [name for name in steps if name in moved or _is_zero_matrix(subject.parameters[name])] if still else []
        if not zero:
            break
        for name in zero:  # what starts at zero hides the gradients of others: it moves first, as far as it should
            if name not in moved and steps[name].any():
                right = subject.expected_settings(name).lr * paper.CHECK_LR
                moved[name] = steps[name] * right / subject.settings[name].lr
        _set(subject, moved)
        later = _first_step(subject, batch)
        steps = later.steps
        pulls |= {name: later.pulls[name] for name in still}
        squares |= {name: later.squares[name] for name in still}
        late |= still
    _set(subject, {name: torch.zeros_like(step) for name, step in moved.items()})
    templates: dict[str, list[str]] = {}
    for name in pulls:
        templates.setdefault(subject.anatomy.template(name), []).append(name)
    rows = []
    for template, names in templates.items():
        part = subject.anatomy.parts[template]
        row, drawn = _row(subject, template, names, pulls, squares, gain), part.role.trait.start == "random"
        row = replace(row, lag=row.lag / first.terms.get(names[0], 1))  # the sum over the width may be unsigned already
        drawn = drawn and not part.kept
        idle = sum(_idle_experts(subject, name) for name in names) if part.role.trait.routed else 0
        rows.append(replace(row, late=not late.isdisjoint(names), drawn=drawn, kept=part.kept, idle=idle))
    if (name := tied_readout(subject)) in gain:
        role, factor = subject.anatomy.part(subject.anatomy.readout.weight).role, subject.expected_tied_multiplier
        expected = (RANDOM_SUM(subject.expected.m_N) * factor, 1.0, factor)
        rows.append(TensorRow(name, role, Column.ADAM, 0, None, 1, None, None, 1, None, 1, gain[name], *expected, None))
    early = {t: names for t, names in templates.items() if late.isdisjoint(names)}
    return rows, list(_part_rows(subject, early, first.parts))


def _is_zero_matrix(parameter: Tensor) -> bool:
    return parameter.dim() > 1 and not parameter.any()


def _part_rows(
    subject: Subject, templates: Mapping[str, list[str]], parts_of: Mapping[str, Parts]
) -> Iterator[PartRow]:
    """Over the blocks, where all of them split the outputs of a matrix alike."""
    for template, names in templates.items():
        in_blocks = [parts_of.get(name, []) for name in names]
        sizes = {tuple(size for size, _ in parts) for parts in in_blocks}
        for i, size in enumerate(next(iter(sizes)) if len(sizes) == 1 else ()):
            pull = math.fsum(parts[i][1] for parts in in_blocks) / subject.share(names)
            yield PartRow(template, i, size, pull)


def _idle_experts(subject: Subject, name: str) -> int:
    """How many experts of a tensor have no gradient; one tensor may stack all of them."""
    parameter = subject.model.get_parameter(name)
    if parameter.grad is None:
        return len(parameter) if parameter.dim() == 3 else 1
    by_expert = parameter.grad.flatten(1).abs().sum(1) if parameter.dim() == 3 else parameter.grad.abs().sum()[None]
    return int((by_expert == 0).sum())


def train_(subject: Subject, factors: Mapping[str, float], batches: Batches, steps: int) -> None:
    """A few steps of AdamW. A weight that was scaled by a factor moves by that factor, as behind a multiplier."""
    tensors = {n: p for n, p in subject.parameters.items() if n in subject.settings and n in subject.columns}
    groups = [
        {"params": [p], "lr": subject.settings[n].lr * abs(factors[subject.anatomy.template(n)])}
        for n, p in tensors.items()
    ]
    optimizer = AdamW(groups, betas=paper.BETAS, eps=NO_EPS, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        subject.loss(batches(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@contextmanager
def aligned_heads(subject: Subject, sizes: Mapping[str, int]) -> Iterator[None]:
    """Where heads are larger than the base's, queries times the root of the ratio.

    At init q·k grows as the root of the head size, in training as the head size itself, which the rules divide by. With
    this factor q·k and its gradients are at init as they are in training.
    """
    handles = []
    for name, attention in subject.forward.attentions.items():
        base = sizes.get(subject.anatomy.template(name), attention.head_size)
        if attention.query is not None and base != attention.head_size:
            scaled = ScaleOutput(RANDOM_SUM(attention.head_size / base))
            handles.append(subject.model.get_submodule(attention.query).register_forward_hook(scaled))
    with _hooks(handles):
        yield


def scaled_readout(subject: Subject, factor: float) -> AbstractContextManager[None]:
    """The logits of a tied readout times a factor: its matrix cannot hold it, since it is the embedding too."""
    site = subject.anatomy.readout.module if subject.anatomy.tied and factor != 1.0 else None
    return _hooks([subject.model.get_submodule(site).register_forward_hook(ScaleOutput(factor))] if site else [])


@torch.no_grad()
def _set(subject: Subject, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        subject.parameters[name].copy_(value)


@dataclass(frozen=True)
class FirstStep:
    """What one step does, by trained parameter."""

    pulls: dict[str, float]
    squares: dict[str, float]  # mean square of the gradient
    steps: dict[str, Tensor]
    parts: dict[str, Parts]  # of a matrix whose outputs the model splits
    terms: dict[str, int]  # of a gain or bias: how many unsigned terms each entry of its gradient sums up


def _first_step(subject: Subject, batch: Batch) -> FirstStep:
    """One backward pass and one step, after which the weights are as before."""
    tensors = {name: p for name, p in subject.parameters.items() if name in subject.settings}
    unsigned: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    subject.zero_grad()
    bare = BareGradients({n: p for n, p in tensors.items() if subject.anatomy.part(n).role.trait.bare})
    conditions = ConditionGradients(subject.layout.blocks)
    outputs = SplitOutputs({name: module for name, module in subject.layout.linears.items() if name in tensors})
    with _unsigned_gradients(subject, unsigned, counts):
        with bare if bare.vectors else nullcontext(), conditions.watching(), outputs.watching():
            loss = subject.loss_everywhere(batch)
        sizes = outputs.sizes(loss)
        loss.backward(retain_graph=bool(bare.vectors or conditions.given))  # type: ignore[no-untyped-call]
    unsigned |= bare.unsigned()
    outside = {n: p for n, p in tensors.items() if not subject.anatomy.part(n).role.trait.inside}
    unsigned |= conditions.unsigned(outside)
    steps = _steps(subject, tensors)
    gradients = {name: p.grad for name, p in tensors.items() if p.grad is not None}
    aligned = {name: unsigned.get(name, gradient) for name, gradient in gradients.items()}
    pulls, squares = dict.fromkeys(tensors, 0.0), dict.fromkeys(tensors, 0.0)
    squares |= {n: norm**2 / tensors[n].numel() for n, norm in zip(aligned, _norms(aligned.values(), 2), strict=True)}
    parts: dict[str, Parts] = {}
    for name, gradient in gradients.items():
        pulls[name] = _pull(gradient, aligned[name], steps[name], subject.columns[name])
        if name in sizes:
            split = zip(torch.split(gradient, sizes[name]), torch.split(steps[name], sizes[name]), strict=True)
            parts[name] = [(len(g), _pull(g, g, step, subject.columns[name])) for g, step in split]
    return FirstStep(pulls, squares, steps, parts, counts)


def _steps(subject: Subject, tensors: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What the first step adds, from zeros in place of the weights: what the optimizer adds is then exact."""
    weights = {name: p.data for name, p in tensors.items()}
    for p in tensors.values():
        p.data = torch.zeros_like(p.data)
    subject.first_step(NO_EPS)
    steps = {name: p.data for name, p in tensors.items()}
    for name, p in tensors.items():
        p.data = weights[name]
    return steps


def _pull(gradient: Tensor, aligned: Tensor, step: Tensor, column: Column) -> float:
    """-Σ g·Δp, for the step that would follow from the aligned gradient."""
    if column is Column.MUON:  # at a fixed rank: at init the rank grows with the width until it meets the tokens
        return _norm(gradient) * float(torch.linalg.matrix_norm(step, 2))
    if column is Column.SGD:  # the step is proportional to the gradient
        return _norm(aligned) ** 2 * _norm(step) / max(_norm(gradient), 1e-300)
    return _norm(aligned * step, 1)


def _norm(x: Tensor, order: int = 2) -> float:
    """Summed in float64."""
    return float(torch.linalg.vector_norm(x, order, dtype=torch.float64))


def _norms(tensors: Iterable[Tensor], order: int) -> list[float]:
    """The same for many tensors."""
    norms = torch._foreach_norm(list(tensors), order, dtype=torch.float64)
    return [float(norm) for norm in norms]


def _row(
    subject: Subject,
    template: str,
    names: list[str],
    pulls: Mapping[str, float],
    squares: Mapping[str, float],
    gain: Mapping[str, float],
) -> TensorRow:
    """One template, over its blocks."""
    trained, expected = [subject.settings[name] for name in names], subject.expected_settings(names[0])
    pull = math.fsum(pulls[n] for n in names) / subject.share(names)
    square = math.fsum(squares[n] for n in names) / len(names)
    in_blocks = [gain[name] for name in names if name in gain]
    whole = len(in_blocks) == len(names)
    lrs, decays = [t.lr for t in trained], [t.lr * t.weight_decay for t in trained]
    eps = [t.eps for t in trained if t.eps is not None]
    typed = geometric_mean(eps) if eps and min(eps) > 0 else None
    return TensorRow(
        template,
        subject.anatomy.parts[template].role,
        subject.columns[names[0]],
        geometric_mean(lrs) if min(lrs) > 0 else 0.0,
        pull or None,
        expected.lr,
        typed,
        typed / square**0.5 if typed and square else None,
        expected.eps,
        math.fsum(decays) / len(decays) or None,
        expected.lr * expected.weight_decay,
        geometric_mean(in_blocks) if whole else None,
        subject.expected_gain(names[0]),
        subject.expected_std(names[0]),
        subject.expected_multiplier(names[0]),
        max(map(unevenness, (in_blocks if whole else [], lrs, eps, decays))),
        subject.lag(names[0]),
    )


def unevenness(values: list[float]) -> float:
    """How far one block is from the others: the largest over the median, or the median over the smallest."""
    if not values or min(values) <= 0:
        return 1.0
    middle = median(values)
    return max(max(values) / middle, middle / min(values))


def geometric_mean(values: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


@contextmanager
def _unsigned_gradients(subject: Subject, kept: dict[str, Tensor], counts: dict[str, int]) -> Iterator[None]:
    """Σ |term| over tokens and heads of the gradients of gains and biases. Matrices keep their plain gradient.

    `counts` fills with the number of terms: it grows with the width if an entry acts on all channels.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    terms: dict[str, int] = {}
    holders = subject.layout.vectors
    keepers = [(module, _keeper(subject, vectors, sums, terms)) for module, vectors in holders]
    with _hooks([module.register_forward_hook(keeper, prepend=True) for module, keeper in keepers]):
        yield
    every = {name: p for _, vectors in holders for name, p in vectors.items()}
    for name, (signed, unsigned) in sums.items():
        gradient = every[name].grad
        if gradient is not None and (signed.view_as(gradient) - gradient).abs().max() <= 1e-3 * unsigned.max():
            kept[name] = unsigned.view_as(gradient)  # otherwise the module is no gain or bias after all
            counts[name] = terms[name]


def _keeper(
    subject: Subject,
    vectors: Mapping[str, nn.Parameter],
    sums: dict[str, tuple[Tensor, Tensor]],
    counts: dict[str, int],
) -> Callable[[nn.Module, object, object], None]:
    """A hook for a module whose output is gain · something + bias."""
    parts = {name: subject.anatomy.part(name) for name in vectors}
    gains = [name for name, part in parts.items() if part.start or part.offset]

    def hook(module: nn.Module, args: object, result: object) -> None:
        output = first_tensor(result)  # a router returns its logits before what it makes of them
        if output is None or not output.requires_grad:
            return
        rows = output.movedim(1, -1) if is_convolution(module) else output
        if any(p.numel() not in (rows.shape[-1], 1) for p in vectors.values()):
            return
        normed = rows.detach()
        for name in vectors.keys() - set(gains) if gains else ():  # only the terms of gains need it
            normed = normed - vectors[name].detach()
        for name in gains:
            normed = normed / (vectors[name].detach() + parts[name].offset)

        def keep(gradient: Tensor) -> None:
            gradient = gradient.movedim(1, -1) if is_convolution(module) else gradient
            for name, p in vectors.items():
                terms = (gradient * normed if name in gains else gradient).reshape(-1, p.numel())
                sums[name] = terms.sum(0), terms.abs().sum(0)
                counts[name] = len(terms)

        output.register_hook(keep)  # type: ignore[no-untyped-call]

    return hook
