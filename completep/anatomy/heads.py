"""The scale on q·k in every attention, measured in a forward pass.

Trained queries and keys align, so q·k grows like d_head and should be divided by it. Most models divide by its root,
some by a constant or by d_head itself. Names and attributes do not say which, so the scale is measured: from the
modules that make the queries and keys, through rotary embeddings and factors of the model, to the softmax.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from completep.anatomy.calls import Call
from completep.anatomy.contractions import summed_axes
from completep.anatomy.stream import below, op

HEAD_SIZE = ("head_dim", "d_head", "head_size", "attention_head_size", "dim_head", "size_per_head", "d_k")
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads", "h")
PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
SOFTMAXES = ("softmax", "log_softmax")
SEEN = frozenset((*PRODUCTS, *SOFTMAXES, "scaled_dot_product_attention", "sum", "mean"))
LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)  # inside, no activation is multiplied with another
MOVES = re.compile(
    r"^((Unsafe)?View|Transpose|Permute|T|Unsqueeze|Squeeze|Split|SplitWithSizes|Unbind|Select|Slice|Clone)$"
)


@dataclass(frozen=True)
class Attention:
    """What one module does with its queries and keys."""

    name: str  # of the module whose forward computes it
    head_size: int
    scale: float  # on q·k, from the modules that make the queries and keys to the softmax
    query: str | None  # the module that takes a factor on the queries
    obstacle: str = ""  # why there is none


@dataclass(frozen=True)
class Scores:
    """Queries and keys as they enter their product, and the factor between that product and the softmax."""

    site: str
    q: Tensor
    k: Tensor
    head_size: int
    factor: float


@dataclass(frozen=True)
class Product:
    """Two activations, multiplied with each other and summed."""

    site: str
    nodes: tuple[Node, Node]
    size: int  # how many numbers are summed


class Recorder(TorchFunctionMode):
    """Sees every q·k that goes into a softmax, in a fused kernel or written out.

    Other products of two activations are only noted: linear attention, or a softmax that is written out.
    """

    def __init__(self, model: nn.Module, is_source: Callable[[str, nn.Module], bool]) -> None:
        super().__init__()
        self.running: list[str] = [""]  # the modules that are running, innermost last
        self.made: dict[Node, Call] = {}  # outputs of modules that may be the queries or keys
        self.products: list[tuple[Tensor, Tensor, Tensor, int, float]] = []  # q·k, q, k, head size, factor inside
        self.kept: list[Tensor] = []  # so that no id is used again
        self.scores: list[Scores] = []
        self.unscaled: dict[int, Product] = {}  # by id of the result: products that no softmax has taken yet
        modules = dict(model.named_modules())
        self.fused = {n: m.head_dim for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)}
        self.handles: list[RemovableHandle] = []
        for name, module in modules.items():
            if type(module) not in LAYERS:
                self.handles.append(module.register_forward_pre_hook(self._entering(name)))
                self.handles.append(module.register_forward_hook(self._leaving, prepend=True))
            if is_source(name, module):
                self.handles.append(module.register_forward_hook(self._made(name), prepend=True))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self.handles:
            handle.remove()

    def _entering(self, name: str) -> Callable[[nn.Module, object], None]:
        return lambda module, args: self.running.append(name)

    def _leaving(self, module: nn.Module, args: object, output: object) -> None:
        self.running.pop()

    def _made(self, name: str) -> Callable[[nn.Module, object, object], None]:
        """This runs before a multiplier's own hook, so the multiplier is part of the measured scale."""

        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self.made.setdefault(output.grad_fn, Call(name, module, (), {}, None, output))

        return hook

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in SEEN:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            q, k = (args[i] if len(args) > i else kwargs[key] for i, key in enumerate(("query", "key")))
            scale = kwargs.get("scale")
            factor = float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
            self.scores.append(Scores(self.running[-1], q, k, q.shape[-1], factor))
        elif name in SOFTMAXES:
            self._softmax(args[0] if args else kwargs["input"])
        result = func(*args, **kwargs)
        if name in ("sum", "mean"):
            self._sum(args[0] if args else kwargs["input"], result)
        if name in PRODUCTS:
            self._product(name, args, kwargs, result)
        return result

    def _product(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        q, k = tensors[-2:] if len(tensors) > 1 else (None, None)
        if not isinstance(result, Tensor) or q is None or k is None or q.grad_fn is None or k.grad_fn is None:
            return  # a product with a parameter
        axes = summed_axes(args[0])[0] if name == "einsum" and isinstance(args[0], str) else (q.dim() - 1,)
        size = math.prod(q.shape[axis] for axis in axes)
        self.products.append((result, q, k, size, float(kwargs.get("alpha", 1.0))))
        self.unscaled[id(result)] = Product(self.running[-1], (q.grad_fn, k.grad_fn), size)

    def _sum(self, x: object, result: object) -> None:
        """(q * k).sum(-1): two activations that were multiplied entry by entry, summed along an axis."""
        if not isinstance(x, Tensor) or not isinstance(result, Tensor) or not result.dim() or x.grad_fn is None:
            return
        factors = below(x.grad_fn) if op(x.grad_fn) == "MulBackward0" else []
        if len(factors) == 2 and factors[0] is not factors[1]:  # otherwise it is the square in a norm
            self.kept.append(result)
            self.unscaled[id(result)] = Product(self.running[-1], (factors[0], factors[1]), x.numel() // result.numel())

    def _softmax(self, x: object) -> None:
        """The last product of the same size is q·k. Its gradient shows the factor, whatever stands between."""
        if not isinstance(x, Tensor) or x.grad_fn is None:
            return
        for result, q, k, size, inside in reversed(self.products):
            if result.numel() != x.numel():
                continue
            (grad,) = torch.autograd.grad(x.sum(), [result], retain_graph=True, allow_unused=True)
            if grad is not None:
                self.scores.append(Scores(self.running[-1], q, k, size, inside * grad.abs().max().item()))
                self.unscaled.pop(id(result), None)
                return

    def attentions(self) -> dict[str, Attention]:
        """By name of the module, and of the queries' module if there are several. Call it before parameters change."""
        by_source: dict[tuple[str, frozenset[Node]], list[Scores]] = {}
        for scores in self.scores:
            sources, _ = _sources(scores.q.grad_fn, self.made)
            by_source.setdefault((scores.site, frozenset(sources)), []).append(scores)
        attentions: dict[str, Attention] = {}
        for (site, _), several in by_source.items():
            attention = self._attention(site, several)
            if not attention.scale > 0:  # what was taken for q·k does not reach the softmax
                continue
            query = (attention.query or "").removeprefix(f"{site}.")
            attentions[site if site not in attentions else f"{site} with {query}"] = attention
        for site, size in self.fused.items():  # torch's own, whose kernel hides its product
            attentions[site] = Attention(
                site, size, float(size) ** -0.5, None, "its queries come from a fused projection"
            )
        return attentions

    def unmeasured(self) -> dict[str, int]:
        """By name of the module: how many numbers are summed in products of activations that no softmax takes."""
        sizes: dict[str, int] = {}
        for p in self.unscaled.values():
            if all(_sources(node, self.made)[0] for node in p.nodes):  # otherwise one of them is a parameter
                sizes[p.site] = sizes.get(p.site, 1) * p.size
        return sizes

    def _attention(self, site: str, scores: Sequence[Scores]) -> Attention:
        first = scores[0]
        query, key = _follow([s.q for s in scores], self.made), _follow([first.k], self.made)
        scale = first.factor * query.factor * key.factor
        shared = f"its queries and keys are both the output of '{query.site}'" if query.site == key.site else ""
        obstacle = query.obstacle or shared
        return Attention(site, first.head_size, scale, None if obstacle else query.site, obstacle)


@dataclass(frozen=True)
class Path:
    """From the module that makes queries or keys to their product."""

    site: str | None
    factor: float
    obstacle: str


def _follow(tensors: Sequence[Tensor], made: Mapping[Node, Call]) -> Path:
    """Rotary embeddings keep the norm of a vector, so the ratio of sizes is the model's own factor.

    Behind a norm without gains, the size itself is the factor: 1 for an RMS norm, d_head^-1/2 for unit vectors.
    """
    nodes, bare = _sources(tensors[0].grad_fn, made)
    if bare:
        return Path(None, 1.0, "its queries are multiplied by a parameter of their own")
    if not nodes:
        return Path(None, 1.0, "its queries are not the output of a module")
    call = made[nodes[0]]
    if len(nodes) > 1:
        return Path(call.site, 1.0, f"its queries come from several modules, of which '{call.site}' is one")
    bare_norm = not any(True for _ in call.module.parameters())
    fused = f"its queries come from a fused projection ('{call.site}')"
    if len(tensors) == 1 and not bare_norm and _only_moved(tensors[0], nodes[0]):
        whole = tensors[0].numel() == call.made.numel()
        return Path(call.site, 1.0 if tensors[0].any() else 0.0, "" if whole else fused)
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(0)) for t in tensors]
    total = torch.stack([(t * w).sum() for t, w in zip(tensors, weights, strict=True)]).sum()
    (grad,) = torch.autograd.grad(total, [call.made], retain_graph=True)
    part = grad != 0  # a fused projection makes the keys and values as well
    factor = _rms(tensors[0]) / max(_rms(call.made[part]), 1e-30)
    degree = float(
        ((call.made * grad).sum() / total).detach()
    )  # Euler: 1 if linear in the module's output, 0 if normalised
    if not abs(degree - 1) < 1e-2:
        normalised = f"its queries are normalised after '{call.site}', which takes any factor away"
        return Path(call.site, _rms(tensors[0]), normalised)
    if not part.all():
        return Path(call.site, factor, fused)
    return Path(call.site, _rms(tensors[0]) if bare_norm else factor, "")


def _only_moved(tensor: Tensor, source: Node) -> bool:
    """True if a tensor holds numbers that a node returned, each once at most: their size needs no measurement."""
    node = tensor.grad_fn
    while node is not None and node is not source and MOVES.search(op(node)):
        node = below(node)[0]
    return node is source


def _sources(root: Node | None, made: Mapping[Node, Call]) -> tuple[list[Node], bool]:
    """(the nodes of the nearest modules below, whether a bare parameter is among them)"""
    nodes: list[Node] = []
    todo = [] if root is None else [root]
    seen, bare = set(todo), False
    while todo:
        node = todo.pop()
        bare = bare or op(node) == "AccumulateGrad"
        if node in made:
            nodes.append(node)
            continue
        new = [child for child in below(node) if child not in seen]
        seen.update(new)
        todo += new
    return nodes, bare


def _rms(x: Tensor) -> float:
    return float(x.detach().square().mean().sqrt())


def named_heads(model: nn.Module, width: int, in_block: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """(module, head size) as the attributes of a model say. Only for what a forward pass does not show."""
    for name, module in model.named_modules():
        if not in_block(name) or not any(True for _ in module.children()):
            continue
        size, heads = _attribute(module, HEAD_SIZE), _attribute(module, HEADS)
        if size is None and heads is not None and width % heads == 0:
            size = width // heads
        if size is not None:
            yield name, size


def _attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
