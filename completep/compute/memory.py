"""Memory per rank: weights, gradients, AdamW's two moments and the activations of one micro-batch.

The state is float32 and sharded over the ranks (FSDP2), and one block at a time is gathered. Activations are the
tensors that autograd saves in the reference decoder with fused attention and no recomputation; a test counts them.
Unused memory that the allocator holds is not included.
"""

from dataclasses import dataclass

from completep.compute import flops
from completep.config import GPTConfig
from completep.errors import UserError

FLOAT32 = 4
STATE = 4  # weight, gradient, and AdamW's first and second moment
CHECKPOINT = 3  # weight and both moments
MOST = 10**9  # ranks, or sequences of a micro-batch


@dataclass(frozen=True)
class Memory:
    """Bytes per rank, and bytes of one checkpoint."""

    state: float
    gathered: float
    activations: float
    checkpoint: float

    @property
    def per_rank(self) -> float:
        return self.state + self.gathered + self.activations


def saved_per_token(model: GPTConfig) -> float:
    """Elements that autograd saves for the backward pass, per token."""
    N, L, F, V = model.width, model.depth, flops.passed(model), model.vocabulary
    rms = 2 * N if model.norm == "rmsnorm" else 0
    inner = 4 * F if model.activation == "swiglu" else 2 * F
    rotary = 3.5 * N if model.positions == "rotary" else 0
    heads = 3 * N if model.qk_norm else 0
    # For every active expert: its input, its output, the output times the gate, and the indices of its tokens.
    routed = model.active_experts * (3 * N + 8) if model.experts else 0
    block = 8 * N + inner + rms + rotary + heads + routed  # in- and outputs of two norms; q, k, v; result of attention
    return L * block + 2 * N + V


def require_devices(ranks: int, micro_batch: int) -> None:
    """Refuse an impossible number of ranks, or of sequences per rank."""
    for name, value in (("ranks", ranks), ("micro_batch", micro_batch)):
        if value < 1:
            raise UserError(f"{name}={value}: must be at least 1", fix=f"give a positive {name}")
        if value > MOST:
            raise UserError(f"{name}={value}: must be at most {MOST:,}", fix=f"give a smaller {name}")


def memory(model: GPTConfig, *, sequence: int, micro_batch: int, ranks: int, activation_bytes: int = FLOAT32) -> Memory:
    require_devices(ranks, micro_batch)
    total = flops.total(model)
    block = flops.non_embedding(model) / model.depth
    # With a large vocabulary, the peak is where the gradient of the softmax exists together with the logits.
    per_token = saved_per_token(model) * activation_bytes + 2 * model.vocabulary * FLOAT32
    return Memory(
        state=STATE * FLOAT32 * total / ranks,
        gathered=2 * FLOAT32 * max(block, model.vocabulary * model.width) if ranks > 1 else 0.0,
        activations=micro_batch * sequence * per_token,
        checkpoint=CHECKPOINT * FLOAT32 * total,
    )
