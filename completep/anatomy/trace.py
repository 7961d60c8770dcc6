"""One forward pass, recorded: which module made which node of the autograd graph, and from which input."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.anatomy.kinds import is_known
from completep.errors import UserError

Example = (
    Tensor | tuple[object, ...] | list[object] | Mapping[str, object]
)  # one input, arguments, or keyword arguments


@dataclass(frozen=True)
class Trace:
    """One forward pass with its autograd graph."""

    model: nn.Module
    logits: Tensor
    made_by: dict[Node, str]  # grad_fn of an output → the linear layer, norm or table that returned it
    inputs: dict[str, Tensor]  # the first tensor that each module was given
    outputs: dict[str, Tensor]  # the first tensor that each module returned
    modules: dict[Node, str]  # like made_by, for all modules; the innermost if several return the same tensor
    nodes: dict[str, Node]  # module → grad_fn of its output
    parameters: dict[int, str]  # id → name

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def node_before(self, name: str) -> Node:
        """The node that made the input of a module."""
        node = self.inputs[name].grad_fn
        if node is None:
            what = f"the input of '{name}' depends on no parameter"
            raise UserError(what, fix="use a model that embeds its inputs first")
        return node


def first_tensor(value: object) -> Tensor | None:
    """The first floating-point tensor among inputs or outputs, which by convention is the stream."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((t for v in value if (t := first_tensor(v)) is not None), None)
    return None


def given_tensor(args: object, kwargs: object) -> Tensor | None:
    """The first floating-point tensor that a module is called with."""
    tensor = first_tensor(args)
    return first_tensor(kwargs) if tensor is None else tensor


def find_logits(output: object) -> Tensor | None:
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits")
    return first_tensor(output) if logits is None else logits


def logits_of(output: object) -> Tensor:
    logits = find_logits(output)
    if logits is None or logits.grad_fn is None:
        what = f"the model's forward returned {type(output).__name__} with no logits that depend on its parameters"
        fix = "pass example=<inputs> for which forward returns logits: as a tensor, as first in a tuple, or as .logits"
        raise UserError(what, fix=fix)
    return logits


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


def input_of(model: nn.Module, site: str, example: Example) -> tuple[Tensor, object]:
    """(the tensor that the module `site` is given, the model's output) of one forward pass."""
    with inputs_kept(model, site) as kept:
        output = call(model, example)
    return kept[site], output


def trace(model: nn.Module, example: Example) -> Trace:
    names = {id(module): name for name, module in model.named_modules()}
    calls = dict.fromkeys(names.values(), 0)
    made_by: dict[Node, str] = {}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    modules: dict[Node, str] = {}
    nodes: dict[str, Node] = {}

    def record(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        name, tensor = names[id(module)], first_tensor(output)
        calls[name] += 1
        if tensor is None or tensor.grad_fn is None:
            return
        nodes[name] = tensor.grad_fn  # read it now: an in-place operation would change it later
        modules.setdefault(tensor.grad_fn, name)
        outputs[name] = tensor
        if (given := given_tensor(args, kwargs)) is not None:
            inputs[name] = given
        if is_known(module):
            made_by.setdefault(tensor.grad_fn, name)

    handles = [m.register_forward_hook(record, with_kwargs=True) for m in model.modules()]
    try:
        with torch.enable_grad():
            output = call(model, example)
    except UserError:
        raise
    except Exception as error:
        what = f"forward failed on the example input: {type(error).__name__}: {error}"
        raise UserError(what, fix="pass example=<inputs that forward takes>: a tensor, a tuple or a dict") from error
    finally:
        for handle in handles:
            handle.remove()
    _refuse_reuse(model, calls)
    parameters = {id(p): name for name, p in model.named_parameters()}
    return Trace(model, logits_of(output), made_by, inputs, outputs, modules, nodes, parameters)


def _refuse_reuse(model: nn.Module, calls: dict[str, int]) -> None:
    """The gradient of a module that runs twice sums over both places. If their depths differ, no rule fits."""
    for name, count in calls.items():
        module = model.get_submodule(name)
        if count > 1 and not isinstance(module, nn.Embedding) and any(True for _ in module.parameters()):
            what = f"'{name}' ({type(module).__name__}) runs {count} times in one forward pass, at several depths"
            raise UserError(what, fix="use one module per place; only embedding and unembedding may share weights")
