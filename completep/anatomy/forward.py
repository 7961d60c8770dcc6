"""The factors that a forward pass already contains, measured: the model may apply them anywhere."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from completep.anatomy.calls import replace_first
from completep.anatomy.contractions import PRODUCTS, constant_factor
from completep.anatomy.heads import Attention, Recorder
from completep.anatomy.kinds import is_product
from completep.anatomy.modes import training_without_dropout
from completep.anatomy.names import plain
from completep.anatomy.proof import randomise_, set_parameters_, set_stream_scales_
from completep.anatomy.roles import Anatomy
from completep.anatomy.specimen import (
    LARGEST_SPECIMEN,
    Base,
    copied,
    guess_example,
    on_cpu,
    on_meta,
    reduced,
    runnable,
    size,
)
from completep.anatomy.trace import Example, inputs_kept, logits_of, recording, results_of, run, stream_kept
from completep.errors import UserError

MULTIPLIES = (*PRODUCTS, "linear", "einsum", "mul", "__mul__", "__rmul__", "multiply")
Place = tuple[str, str]  # what is multiplied there, and the name of the module or table
LARGEST_CHECKED = 100_000_000  # parameters of a model that is copied and run as a whole
# Blocks of such a model. When a graph with gradients is freed, torch recurses natively along it: at some 3,500 blocks
# of the reference decoder, it runs out of an ordinary stack of 8 MB.
DEEPEST_CHECKED = 1500


@dataclass(frozen=True)
class ForwardFactors:
    """What the model multiplies by itself."""

    sites: dict[str, float]  # module at the end of a branch → into the stream; readout module → into the logits
    inside: dict[str, float]  # the part of it that the module's own forward applies, as the readout of mup does
    tables: dict[str, float]  # weight of a table or input projection → into the stream
    attentions: dict[str, Attention]  # by name of the module
    unmeasured: dict[str, int]  # module → numbers summed in products of activations whose scale cannot be measured
    normed: dict[str, int]  # norm → how many numbers it returns, over all tokens and heads
    bare: dict[str, float] = field(default_factory=dict)  # parameter at the end of a branch without a module → stream
    training: "ForwardFactors | None" = None  # the factors in training mode, if they differ
    drawn: bool = False  # True if the factors of training mode differ and are random

    @property
    def trained(self) -> "ForwardFactors":
        """The factors during training."""
        return self.training or self

    def in_training(self) -> dict[Place, float]:
        """What training mode multiplies by in addition."""
        here, there = self._all(), self.trained._all()
        return {name: there.get(name, value) / value for name, value in here.items() if value}

    def _all(self) -> dict[Place, float]:
        scales = {("q·k in ", name): attention.scale for name, attention in self.attentions.items()}
        return {("", name): factor for name, factor in (self.sites | self.tables | self.bare).items()} | scales


class Probe:
    """Forward hook that adds zeros to the output. Their gradient shows how much of the output arrives elsewhere."""

    def __init__(self) -> None:
        self.zeros: Tensor | None = None

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        return replace_first(output, self.with_zeros)

    def with_zeros(self, first: Tensor) -> Tensor:
        self.zeros = torch.zeros_like(first, requires_grad=True)
        return first + self.zeros


class BareProbes(TorchFunctionMode):
    """Adds zeros to the products with some parameters, which no module makes.

    A parameter may be multiplied by a constant before its product: that constant is part of the factor.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.known = {id(p): (name, 1.0) for name, p in parameters.items()}  # with the constant on it
        self.kept: list[Tensor] = []  # so that no id is used again
        self.zeros: dict[str, list[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        operands = [(a, known) for a in args if isinstance(a, Tensor) and (known := self._known(a)) is not None]
        if len(operands) != 1 or not isinstance(result, Tensor):
            return result
        operand, (parameter, constant) = operands[0]
        if (factor := constant_factor(name, args, operand)) is not None:
            self.known[id(result)] = parameter, constant * factor
            self.kept.append(result)
            return result
        if name not in MULTIPLIES or sum(isinstance(a, Tensor) for a in args) < 2:
            return result
        zeros = torch.zeros_like(result, requires_grad=True)
        self.zeros.setdefault(parameter, []).append(zeros)
        return result + constant * zeros

    def _known(self, tensor: Tensor) -> tuple[str, float] | None:
        return self.known.get(id(tensor if tensor._base is None else tensor._base))


def measure_forward(
    model: nn.Module, anatomy: Anatomy, example: Example | None = None, *, training: bool = False
) -> ForwardFactors:
    """Run a copy of the model once. With all writers at zero, only embeddings and probes reach the stream.

    With `training`, it is also run in training mode, where it may have other factors.
    """
    return make_bench(model, anatomy, example).measure(training=training)


@recording()
def make_bench(model: nn.Module, anatomy: Anatomy, example: Example | None) -> "Bench":
    """With a copy of the model, on the CPU."""
    if (count := blocks_of(model, anatomy)) > DEEPEST_CHECKED:
        raise UserError(
            f"a model with {count} blocks is too deep to measure as a whole",
            fix=f"use a model and a base with at most {DEEPEST_CHECKED} blocks",
        )
    with on_cpu():
        return Bench(runnable(copied(model)), anatomy, example)


class Bench:
    """A model to measure the factors of its forward pass on, also again after a change. This overwrites its weights."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, example: Example | None) -> None:
        self.model, self.anatomy = model, anatomy
        self.example = guess_example(model) if example is None else example
        self._fill()

    def _fill(self) -> None:
        model, anatomy = self.model, self.anatomy
        randomise_(model)
        set_stream_scales_(model, anatomy.part)
        with torch.no_grad():
            for weight in {outlet.weight for outlet in anatomy.outlets}:
                model.get_parameter(weight).mul_(1e-2)  # small logits, where a soft-cap does nothing
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self.own_linears = any(type(m).forward is not nn.Linear.forward for m in linears.values())
        self.inside = {n: factor for n, m in linears.items() if (factor := _inside(m)) != 1.0}
        names = [name for name, _ in model.named_parameters()]
        set_parameters_(model, _result_biases(names, anatomy))
        set_parameters_(model, _open_gates(names, anatomy))
        set_parameters_(model, _zero_writers(names, anatomy))

    @recording()
    def measure(self, *, training: bool = False) -> ForwardFactors:
        """One forward pass; with `training`, another one in training mode."""
        given = self.model, self.anatomy, self.example, self.inside
        with on_cpu():
            factors = _run(*given)
            return _with_training(factors, *given) if training else factors

    def measure_again(self) -> ForwardFactors:
        """After multipliers were put on the model. Linear layers of a class of their own may apply them inside."""
        if self.own_linears:
            self._fill()
        return self.measure()


def _with_training(
    factors: ForwardFactors, model: nn.Module, anatomy: Anatomy, example: Example, inside: dict[str, float]
) -> ForwardFactors:
    """The factors of training mode beside those of evaluation mode. Random ones say nothing about the size."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]), training_without_dropout(model):
            before = torch.random.get_rng_state()
            trained = _run(model, anatomy, example, inside)
            drawn = not torch.equal(before, torch.random.get_rng_state())
    except (UserError, RuntimeError, KeyError, IndexError):  # the proof says if training mode cannot be run or seen
        return factors
    finally:
        _restore_buffers(model, buffers)
    a, b = factors._all(), trained._all()
    if all(abs(a[name] - b[name]) <= 1e-3 * abs(a[name]) for name in a.keys() & b.keys()):
        return factors
    return replace(factors, training=None if drawn else trained, drawn=drawn)


@torch.no_grad()
def _restore_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Training mode changes the running statistics of a batch norm."""
    for name, buffer in model.named_buffers():
        if name in values and values[name].shape == buffer.shape:
            buffer.copy_(values[name])


def _run(model: nn.Module, anatomy: Anatomy, example: Example, inside: dict[str, float]) -> ForwardFactors:
    """One forward pass, with probes."""
    modules = dict(model.named_modules())
    # A table may scale its rows itself, so its own gradient counts. Of an input projection, its output is taken.
    tables = {t for t in anatomy.tables if isinstance(model.get_submodule(_site(t)), nn.Embedding)}
    projections = {_site(t): t for t in anatomy.tables if t not in tables}
    ends = {b.module for b in anatomy.branches if b.module} | projections.keys()
    probes = {n: Probe() for n in modules if anatomy.template(n) in ends}
    loose = {p for branch in anatomy.branches if branch.module is None for p in branch.parameters}
    ending = {n: p for n, p in model.named_parameters() if anatomy.template(n) in loose} if loose else {}
    bare = BareProbes(ending)
    with ExitStack() as hooks:
        for name, probe in probes.items():  # before a multiplier's own hook
            hooks.callback(modules[name].register_forward_hook(probe, prepend=True).remove)
        normed = {o.module: _outputs(model, o.norm, hooks) for o in anatomy.outlets if o.module}
        readouts = {o.module: _outputs(model, o.module, hooks) for o in anatomy.outlets if o.module}
        norms = {n: _outputs(model, n, hooks) for n in modules if anatomy.template(n) in anatomy.norms}
        recorder = Recorder(model, lambda name, module: _may_make_queries(name, module, anatomy))
        with (
            bare if ending else nullcontext(),
            recorder,
            inputs_kept(model, *readouts) as kept,
            stream_kept(model, anatomy.tap) as streams,
        ):
            output = run(model, example)
    logits, stream = logits_of(output), streams[-1]
    results = [tensor for _, tensor in results_of(output) if tensor is not logits]
    zeros = {name: probe.zeros for name, probe in probes.items() if probe.zeros is not None}
    arriving = _arriving(stream, zeros | {name: model.get_parameter(name) for name in tables})
    sites = {name: arriving.pop(name) * inside.get(name, 1.0) for name in zeros}
    sites |= _experts(list(probes), sites, anatomy)
    on_bare = {name: _mean_gradient(stream, zeros) for name, zeros in bare.zeros.items()}
    embeddings = {table: sites.pop(site) for site, table in projections.items()} | arriving
    for site, made in readouts.items():
        x = next(
            (x for x in normed[site][-1:] if x.shape == kept[site].shape), kept[site]
        )  # or the model pools between
        seen = [logits] if site == anatomy.readout.module else results
        arrives = sum(_arriving(result, {"": made[-1]})[""] for result in seen)
        sites[site] = arrives * inside.get(site, 1.0) * _logit_factor(model.get_submodule(site), x, made[-1])
    sizes = {name: made[0].numel() for name, made in norms.items() if made}
    return ForwardFactors(sites, inside, embeddings, recorder.attentions(), recorder.unmeasured(), sizes, on_bare)


def _experts(probed: list[str], sites: dict[str, float], anatomy: Anatomy) -> dict[str, float]:
    """The factors of the experts in lists: all of a block together, since routing divides a token among them.

    Its gates are the same for all experts here, so which of them run is a matter of ties.
    """
    factors: dict[str, float] = {}
    for name in probed:
        stack = anatomy.stack_of(name)
        block = None if stack is None or stack.expert(name) is None else stack.pattern.match(name)
        if block is not None:
            same = [
                n for n in sites if n.startswith(f"{block.group(0)}.") and anatomy.template(n) == anatomy.template(name)
            ]
            factors[name] = sum(sites[n] for n in same)
    return factors


def _site(table: str) -> str:
    return table.rpartition(".")[0]


def _outputs(model: nn.Module, site: str | None, hooks: ExitStack) -> list[Tensor]:
    """Fills with what a module returns, after all hooks on it."""
    outputs: list[Tensor] = []
    if site:
        handle = model.get_submodule(site).register_forward_hook(lambda m, args, output: outputs.append(output))
        hooks.callback(handle.remove)
    return outputs


def _may_make_queries(name: str, module: nn.Module, anatomy: Anatomy) -> bool:
    single = not module._modules and any(p is not None for p in module._parameters.values())
    attention = isinstance(module, nn.MultiheadAttention)
    return not attention and (single or is_product(module) or anatomy.template(name) in anatomy.norms)


def _result_biases(names: Sequence[str], anatomy: Anatomy) -> dict[str, float]:
    """Biases of results at 0, where a nonlinearity after them, such as a sigmoid, has one slope at every size."""
    traits = {name: anatomy.part(plain(name)).role.trait for name in names}
    return {name: 0.0 for name, t in traits.items() if t.acts_on == "logits" and t.fan == "fixed"}


def _open_gates(names: Sequence[str], anatomy: Anatomy) -> dict[str, float]:
    """Gates that are the same number at every size: gains and biases at 1, matrices at 0."""
    gates = [name for name in names if anatomy.template(name) in anatomy.gates]
    opened = {name: 0.0 if anatomy.part(name).role.trait.matrix else 1.0 for name in gates}
    return opened | dict.fromkeys(anatomy.conditions, 0.0)


def _zero_writers(names: Sequence[str], anatomy: Anatomy) -> dict[str, float]:
    writers = {p for b in anatomy.branches for p in b.parameters}
    return {name: -anatomy.part(name).offset for name in names if anatomy.template(name) in writers}


def _mean_gradient(stream: Tensor, sources: list[Tensor]) -> float:
    """How much of a unit in one entry arrives. The products of several heads may be added up later."""
    grads = torch.autograd.grad(stream.sum(), sources, retain_graph=True, allow_unused=True)
    return sum(g.sum().item() for g in grads if g is not None) / sum(source.numel() for source in sources)


def _arriving(stream: Tensor, sources: dict[str, Tensor]) -> dict[str, float]:
    """How much of a unit added at each source arrives in the stream. Pooling divides it among the tokens."""
    tensors = list(sources.values())
    grads = torch.autograd.grad(stream.sum(), tensors, retain_graph=True, allow_unused=True) if tensors else ()
    return {n: 0.0 if g is None else g.sum().item() / stream.numel() for n, g in zip(sources, grads, strict=True)}


@torch.no_grad()
def _logit_factor(readout: nn.Module, x: Tensor, made: Tensor) -> float:
    """What the readout made, relative to what its class makes of the normed stream."""
    bias = type(readout).forward(readout, torch.zeros_like(x))
    return _multiple(made - bias, type(readout).forward(readout, x) - bias)


@torch.no_grad()
def _inside(linear: nn.Linear) -> float:
    """What the class of a linear layer multiplies its product by; 1 if it does something else."""
    forward = type(linear).forward
    if forward is nn.Linear.forward:
        return 1.0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, linear.in_features, generator=generator, dtype=linear.weight.dtype)
    try:
        made = forward(linear, x) - forward(linear, torch.zeros_like(x))
        product = nn.functional.linear(x, linear.weight)
        factor = _multiple(made, product)
    except Exception:  # it needs other inputs
        return 1.0
    return factor if (made - factor * product).norm() <= 1e-3 * made.norm() else 1.0


def _multiple(made: Tensor, product: Tensor) -> float:
    """By least squares."""
    return float(made.flatten() @ product.flatten() / product.square().sum())


def blocks_of(model: nn.Module, anatomy: Anatomy) -> int:
    """How many blocks the deepest stack of the model has."""
    names = [plain(name) for name, _ in model.named_modules()]
    return max((stack.depth(names) for stack in anatomy.blocks), default=0)


class OwnFactors:
    """The factors of a model and of its base. Each is measured when it is first needed, and only once."""

    def __init__(self, model: nn.Module, base: Base, anatomy: Anatomy, example: Example | None) -> None:
        self.model, self.base, self.anatomy, self.example = model, base, anatomy, example
        self.unchecked: list[str] = []  # what could not be measured, in words

    @cached_property
    def here(self) -> ForwardFactors:
        """Of the whole model, which must not be on the meta device."""
        return self.bench.measure(training=True)

    @cached_property
    def bench(self) -> Bench:
        """A copy of the whole model."""
        return make_bench(self.model, self.anatomy, self.example)

    @property
    def is_whole(self) -> bool:
        """True if the model itself can be run, not only a reduced copy."""
        small = not on_meta(self.model) and size(self.model) <= LARGEST_CHECKED
        return small and blocks_of(self.model, self.anatomy) <= DEEPEST_CHECKED

    @cached_property
    def here_or_reduced(self) -> ForwardFactors | None:
        """Of the model, or of a reduced copy if it is large or on the meta device. None if neither can be run."""
        factors = self.here if self.is_whole else self._reduced()
        if factors is not None and factors.drawn:
            self.unchecked.append("the factors on branches in training mode, which draws random numbers")
        return factors

    def _reduced(self) -> ForwardFactors | None:
        with on_cpu():
            small = reduced(self.model, self.anatomy.blocks, self._rows(), self._buffers)
            try:
                if small is not None:
                    return Bench(small, self.anatomy, self.example).measure(training=True)
                why = f"even one block of it has more than {LARGEST_SPECIMEN:,} parameters"
            except Exception as error:  # the forward pass of any model may fail with fewer blocks than it expects
                why = f"a copy with one block of each kind does not run ({type(error).__name__}: {error})"
        self.unchecked.append(f"whether the model scales itself with its size: {why}")
        return None

    def _rows(self) -> list[str]:
        """The parameters with a row per token, of which an example of our own needs only the first few."""
        tables = [f"{name}.weight" for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)]
        return [] if self.example is not None else [*tables, *self.anatomy.readout_rows]

    @cached_property
    def guessed_buffers(self) -> bool:
        """True if a factor may hide in a number that has no value on the meta device, as in Gemma 3."""
        return any(b.is_meta and b.dim() == 0 and b.is_floating_point() for b in self.model.buffers())

    @property
    def _buffers(self) -> dict[str, Tensor]:
        return dict(self.base.real.named_buffers()) if self.base.is_small and self.base.real is not None else {}

    @cached_property
    def at_base(self) -> ForwardFactors | None:
        """By template; None if the base is only a Shape, or too large to run."""
        if self.base.model is not None and not self.base.is_small:
            self.unchecked.append("whether the model scales itself with its size: the base is too large to run")
            return None
        return self.base.once("factors", self._at_base)

    def _at_base(self) -> ForwardFactors | None:
        if self.base.real is None:
            return None
        factors = measure_forward(self.base.real, self.anatomy, self.example, training=True)
        return _by_template(factors, self.anatomy.template)


def _by_template(factors: ForwardFactors, template: Callable[[str], str]) -> ForwardFactors:
    attentions = {template(n): a for n, a in factors.attentions.items()}
    sites, inside, bare = (
        {template(n): f for n, f in of.items()} for of in (factors.sites, factors.inside, factors.bare)
    )
    unmeasured, normed = ({template(n): size for n, size in of.items()} for of in (factors.unmeasured, factors.normed))
    training = None if factors.training is None else _by_template(factors.training, template)
    return ForwardFactors(sites, inside, factors.tables, attentions, unmeasured, normed, bare, training)
