"""Parameters and training FLOPs of the reference decoder, per component.

These conventions reproduce the paper's size table exactly. A matrix product of m×n×k costs 2mnk, its backward pass
twice that. Attention is counted over the whole sequence, without the causal half. The input embedding counts as a dense
one-hot product whose backward pass is the weight gradient alone. Softmax and norms cost 3 FLOPs per element and
nonlinearities 1, backward twice that. A bias costs 1 per element in each direction. Residual additions are not counted.

Letters: N width, L depth, T tokens per sequence, V vocabulary, F feed-forward width, H heads.
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
    N, L, V, F, H, T = model.width, model.depth, model.vocabulary, model.feed_forward, model.heads, sequence
    gated = model.activation == "swiglu"
    matrices = 3 if gated else 2
    norms = (2 * L + 1) * N + (2 * L * N if model.qk_norm else 0)
    biases = L * (3 * N + N + (matrices - 1) * F + N) if model.bias else 0
    return {
        "embedding": Cost(2 * V * N, 2 * V * N),
        "qkv": twice_backward(2 * 3 * N * N * L),
        "scores": twice_backward(2 * T * N * L),
        "softmax": twice_backward(SOFTMAX * T * H * L),
        "values": twice_backward(2 * T * N * L),
        "output": twice_backward(2 * N * N * L),
        "mlp": twice_backward(2 * matrices * N * F * L),
        "norms": twice_backward(NORM * norms),
        "biases": Cost(BIAS * biases, BIAS * biases),
        "nonlinearity": twice_backward(NONLINEARITY * (2 if gated else 1) * F * L),
        "unembedding": twice_backward(2 * V * N),
    }


MATMULS = ("qkv", "scores", "values", "output", "mlp", "unembedding")


def training_flops(model: GPTConfig, sequence: int, tokens: float) -> float:
    return tokens * sum(cost.total for cost in flops_per_token(model, sequence).values())


def parameters(model: GPTConfig) -> dict[str, int]:
    """Parameters per component. Those inside the blocks are `non_embedding`, as in the paper."""
    N, L, V, F = model.width, model.depth, model.vocabulary, model.feed_forward
    bias = int(model.bias)
    matrices = 3 if model.activation == "swiglu" else 2
    norm = N * (2 if model.norm == "layernorm" and model.bias else 1)
    head_norm = norm // N * model.head_size * 2 if model.qk_norm else 0
    return {
        "embedding": V * N,
        "positions": model.context * N if model.positions == "learned" else 0,
        "qkv": L * (3 * N * N + bias * 3 * N),
        "output": L * (N * N + bias * N),
        "mlp": L * (matrices * N * F + bias * ((matrices - 1) * F + N)),
        "norms": L * (2 * norm + head_norm),
        "final norm": norm,
        "unembedding": 0 if model.tied else V * N,
    }


BLOCK_PARTS = ("qkv", "output", "mlp", "norms")


def non_embedding(model: GPTConfig) -> int:
    return sum(parameters(model)[part] for part in BLOCK_PARTS)


def total(model: GPTConfig) -> int:
    return sum(parameters(model).values())
