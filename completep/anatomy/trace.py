"""One forward pass, recorded: which module made which node of the autograd graph, and from which input."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.anatomy.calls import Call
from completep.anatomy.calls import first_tensor as first_tensor  # others read it here, where passes are recorded
from completep.anatomy.calls import given_tensor as given_tensor
from completep.anatomy.contractions import Contractions, Stacking
from completep.anatomy.kinds import is_product
from completep.anatomy.norms import normalises
from completep.errors import UserError

Example = (
    Tensor | tuple[object, ...] | list[object] | Mapping[str, object]
)  # one input, arguments, or keyword arguments


@dataclass(frozen=True)
class Tap:
    """Where the stream after the last block can be seen: what a module is given, or what the last block returns."""

    place: str  # name of the module; of a block, the name without its number
    returned: bool = False

    def module(self, model: nn.Module) -> str:
        """The name of the module in a model, which may have another number of blocks."""
        if not self.returned:
            return self.place
        numbers = re.compile(rf"{re.escape(self.place)}(\d+)")
        blocks: dict[int, str] = {}
        for name, _ in model.named_modules():
            if (match := numbers.fullmatch(name)) is not None:
                blocks[int(match.group(1))] = name
        return blocks[max(blocks)]

    def seen(self, t: "Trace") -> Tensor:
        """The stream in a recorded pass."""
        return (t.outputs if self.returned else t.inputs)[self.module(t.model)]


@dataclass(frozen=True)
class Trace:
    """One forward pass with its autograd graph."""

    model: nn.Module
    logits: Tensor
    results: dict[str, Tensor]  # all other results that depend on parameters, by their place in the output
    made_by: dict[Node, Call]  # grad_fn of an output → the call of the linear layer, norm or table that returned it
    norms: frozenset[str]  # modules that normalise their input
    inputs: dict[str, Tensor]  # the first tensor that each module was given, in its last call
    outputs: dict[str, Tensor]  # the first tensor that each module returned
    modules: dict[Node, str]  # like made_by, for all modules; the innermost if several return the same tensor
    nodes: dict[str, Node]  # module → grad_fn of its output
    parameters: dict[int, str]  # id → name
    summed: dict[str, tuple[int, ...]]  # parameter → the axes that its products sum over, if they could be seen
    stacked: dict[str, Stacking]  # parameters that hold several matrices, one per expert or head
    made: dict[Node, Tensor]  # what each operation returned

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def site_of(self, node: Node) -> str | None:
        """The linear layer, norm or table that returned this node's tensor."""
        call = self.made_by.get(node)
        return None if call is None else call.site


def find_logits(output: object) -> Tensor | None:
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    if logits is None and isinstance(output, tuple):  # a loss may come first
        output = tuple(part for part in output if not (isinstance(part, Tensor) and part.dim() == 0)) or output
    return first_tensor(output) if logits is None else logits


def results_of(output: object, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """All results that depend on parameters, with their places in the output."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            yield place, output
        return
    parts: Mapping[object, object] = {}
    if isinstance(output, Mapping):
        parts = output
    elif isinstance(output, (tuple, list)):
        parts = dict(enumerate(output))
    elif is_dataclass(output) and not isinstance(output, type):
        parts = {f.name: getattr(output, f.name) for f in fields(output)}
    for key, part in parts.items():
        yield from results_of(part, f"{place}.{key}" if place else str(key))


def logits_of(output: object) -> Tensor:
    logits = find_logits(output)
    if logits is None or logits.grad_fn is None:
        what = f"the model's forward returned {type(output).__name__} with no logits that depend on its parameters"
        fix = "pass example=<inputs> for which forward returns logits: as a tensor, in a tuple, or as .logits"
        raise UserError(what, fix=fix)
    return logits


@contextmanager
def recording() -> Iterator[None]:
    """Records gradients, also if you are inside torch.no_grad() or torch.inference_mode()."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def call(model: nn.Module, example: Example) -> object:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


@contextmanager
def inputs_kept(model: nn.Module, *sites: str) -> Iterator[dict[str, Tensor]]:
    """Keeps what these modules are given, before hooks on them change it."""
    kept: dict[str, Tensor] = {}

    def keep(site: str, args: object, kwargs: object) -> None:
        if (tensor := given_tensor(args, kwargs)) is not None:
            kept[site] = tensor

    handles = [
        model.get_submodule(site).register_forward_pre_hook(
            lambda module, args, kwargs, site=site: keep(site, args, kwargs), with_kwargs=True, prepend=True
        )
        for site in sites
    ]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def stream_kept(model: nn.Module, tap: Tap) -> Iterator[list[Tensor]]:
    """Keeps the stream after the last block, in the order of the passes."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor | None) -> None:
        if tensor is not None:
            kept.append(tensor)

    module = model.get_submodule(tap.module(model))
    if tap.returned:
        handle = module.register_forward_hook(lambda module, args, output: keep(first_tensor(output)))
    else:
        handle = module.register_forward_pre_hook(
            lambda module, args, kwargs: keep(given_tensor(args, kwargs)), with_kwargs=True, prepend=True
        )
    try:
        yield kept
    finally:
        handle.remove()


def stream_of(model: nn.Module, tap: Tap, example: Example) -> tuple[Tensor, object]:
    """(the stream after the last block, the model's output) of one forward pass."""
    with stream_kept(model, tap) as kept:
        output = call(model, example)
    return kept[-1], output


def trace(model: nn.Module, example: Example) -> Trace:
    """Run the model once and record what its modules did."""
    names = {id(module): name for name, module in model.named_modules()}
    counts = dict.fromkeys(names.values(), 0)
    calls: list[tuple[Node, Call]] = []
    modules: dict[Node, str] = {}

    def record(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], output: object) -> None:
        name, made = names[id(module)], first_tensor(output)
        counts[name] += 1
        if made is None or made.grad_fn is None:
            return
        modules.setdefault(made.grad_fn, name)  # read it now: an in-place operation would change it later
        calls.append((made.grad_fn, Call(name, module, args, kwargs, given_tensor(args, kwargs), made)))

    handles = [m.register_forward_hook(record, with_kwargs=True) for m in model.modules()]
    contractions = Contractions()
    try:
        with contractions:
            output = run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    _refuse_reuse(model, counts)
    logits = logits_of(output)
    contractions.settle(logits)
    norms = {call.site for _, call in calls if normalises(call)}
    made_by: dict[Node, Call] = {}
    for node, call in calls:
        if is_product(call.module) or call.site in norms:
            made_by.setdefault(node, call)
    return Trace(
        model=model,
        logits=logits,
        results={place: tensor for place, tensor in results_of(output) if tensor is not logits},
        made_by=made_by,
        norms=frozenset(norms),
        inputs={call.site: call.given for _, call in calls if call.given is not None},
        outputs={call.site: call.made for _, call in calls},
        modules=modules,
        nodes={call.site: node for node, call in calls},
        parameters={id(p): name for name, p in model.named_parameters()},
        summed={name: contractions.axes.get(id(p), ()) for name, p in model.named_parameters()},
        stacked={n: contractions.stacked[id(p)] for n, p in model.named_parameters() if id(p) in contractions.stacked},
        made=contractions.made,
    )


def run(model: nn.Module, example: Example) -> object:
    """Call the model. An error of its own forward is reported with the way to pass other inputs."""
    try:
        return call(model, example)
    except UserError:
        raise
    except Exception as error:
        what = f"forward failed on the example input: {type(error).__name__}: {error}"
        raise UserError(what, fix="pass example=<inputs that forward takes>: a tensor, a tuple or a dict") from error


def _refuse_reuse(model: nn.Module, counts: dict[str, int]) -> None:
    """The gradient of a module that runs twice sums over both places. If their depths differ, no rule fits."""
    for name, count in counts.items():
        module = model.get_submodule(name)
        if count > 1 and not isinstance(module, nn.Embedding) and any(True for _ in module.parameters()):
            what = f"'{name}' ({type(module).__name__}) runs {count} times in one forward pass, at several depths"
            raise UserError(what, fix="use one module per place; only embedding and unembedding may share weights")
