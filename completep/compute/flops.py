"""Parameters and training FLOPs of the reference decoder, per component.

These conventions reproduce the paper's size table exactly. A matrix product of m×n×k costs 2mnk, its backward pass
twice that. Attention is counted over the whole sequence, without the causal half. The input embedding counts as a dense
one-hot product whose backward pass is the weight gradient alone. Softmax and norms cost 3 FLOPs per element and
nonlinearities 1, backward twice that. A bias costs 1 per element in each direction. Residual additions are not counted.

Of a mixture of experts, a token passes the router, its active experts and the shared ones. A gate counts as a
nonlinearity, and so does its product with what an expert made. Only shared experts have biases.

Letters: N width, L depth, T tokens per sequence, V vocabulary, F feed-forward width, H heads, E experts.
"""

from dataclasses import dataclass

from completep.config import GPTConfig

SOFTMAX, NORM, NONLINEARITY, BIAS = 3, 3, 1, 1  # FLOPs per element, forward


@dataclass(frozen=True)
class Cost:
    """FLOPs per token."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def twice_backward(forward: float) -> Cost:
    return Cost(forward, 2 * forward)


def flops_per_token(model: GPTConfig, sequence: int) -> dict[str, Cost]:
    """Training FLOPs per token, per component."""
    N, L, V, H, T, E = model.width, model.depth, model.vocabulary, model.heads, sequence, model.experts
    F = passed(model)
    gated = model.activation == "swiglu"
    matrices = 3 if gated else 2
    norms = (2 * L + 1) * N + (2 * L * N if model.qk_norm else 0)
    biases = L * (3 * N + N + _mlp_biases(model)) if model.bias else 0
    gates = model.active_experts * (1 + N) if E else 0
    router = {"router": twice_backward(2 * N * E * L)} if E else {}
    return {
        "embedding": Cost(2 * V * N, 2 * V * N),
        "qkv": twice_backward(2 * 3 * N * N * L),
        "scores": twice_backward(2 * T * N * L),
        "softmax": twice_backward(SOFTMAX * T * H * L),
        "values": twice_backward(2 * T * N * L),
        "output": twice_backward(2 * N * N * L),
        **router,
        "mlp": twice_backward(2 * matrices * N * F * L),
        "norms": twice_backward(NORM * norms),
        "biases": Cost(BIAS * biases, BIAS * biases),
        "nonlinearity": twice_backward(NONLINEARITY * ((2 if gated else 1) * F + gates) * L),
        "unembedding": twice_backward(2 * V * N),
    }


def passed(model: GPTConfig) -> int:
    """The inner width that one token passes, over all MLPs of a block."""
    return (model.active_experts + model.shared_experts) * model.expert_size if model.experts else model.feed_forward


def _mlp_biases(model: GPTConfig) -> int:
    """Entries of the biases of a block's MLP. Experts that a router chooses have none."""
    matrices = 3 if model.activation == "swiglu" else 2
    inner = model.shared_experts * model.expert_size if model.experts else model.feed_forward
    return (matrices - 1) * inner + model.width if inner else 0


MATMULS = ("qkv", "scores", "values", "output", "mlp", "unembedding")


def training_flops(model: GPTConfig, sequence: int, tokens: float) -> float:
    return tokens * sum(cost.total for cost in flops_per_token(model, sequence).values())


def parameters(model: GPTConfig) -> dict[str, int]:
    """Parameters per component. Those inside the blocks are `non_embedding`, as in the paper."""
    N, L, V, E = model.width, model.depth, model.vocabulary, model.experts
    F = (E + model.shared_experts) * model.expert_size if E else model.feed_forward
    bias = int(model.bias)
    matrices = 3 if model.activation == "swiglu" else 2
    norm = N * (2 if model.norm == "layernorm" and model.bias else 1)
    head_norm = norm // N * model.head_size * 2 if model.qk_norm else 0
    return {
        "embedding": V * N,
        "positions": model.context * N if model.positions == "learned" else 0,
        "qkv": L * (3 * N * N + bias * 3 * N),
        "output": L * (N * N + bias * N),
        **({"router": L * N * E} if E else {}),
        "mlp": L * (matrices * N * F + bias * _mlp_biases(model)),
        "norms": L * (2 * norm + head_norm),
        "final norm": norm,
        "unembedding": 0 if model.tied else V * N,
    }


BLOCK_PARTS = ("qkv", "output", "router", "mlp", "norms")


def non_embedding(model: GPTConfig) -> int:
    return sum(parameters(model).get(part, 0) for part in BLOCK_PARTS)


def active(model: GPTConfig) -> int:
    """The parameters that one token passes: all but those of the experts that it is not sent to."""
    matrices = 3 if model.activation == "swiglu" else 2
    idle = max(model.experts - model.active_experts, 0) if model.experts else 0
    return total(model) - idle * matrices * model.width * model.expert_size * model.depth


def total(model: GPTConfig) -> int:
    return sum(parameters(model).values())
