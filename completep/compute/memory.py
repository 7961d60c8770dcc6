"""What a rank must hold: weights, gradients, AdamW's two moments and the activations of one micro-batch.

State is float32 and sharded over the ranks (FSDP2); one block at a time is gathered. Activations are what autograd saves in
the reference decoder with fused attention and no recomputation, which a test counts; allocator slack is not included.
"""

from dataclasses import dataclass

from completep.compute import flops
from completep.config import GPTConfig
from completep.errors import UserError

FLOAT32 = 4
STATE = 4  # weight, gradient, and AdamW's first and second moment
CHECKPOINT = 3  # weight and both moments


@dataclass(frozen=True)
class Memory:
    """Bytes per rank, and of one checkpoint."""

    state: float
    gathered: float
    activations: float
    checkpoint: float

    @property
    def per_rank(self) -> float:
        return self.state + self.gathered + self.activations


def saved_per_token(model: GPTConfig) -> float:
    """Elements that autograd keeps for one token until its backward pass."""
    N, L, F, V = model.width, model.depth, model.feed_forward, model.vocabulary
    rms = 2 * N if model.norm == "rmsnorm" else 0
    inner = 4 * F if model.activation == "swiglu" else 2 * F
    rotary = 3.5 * N if model.positions == "rotary" else 0
    heads = 3 * N if model.qk_norm else 0
    block = 8 * N + inner + rms + rotary + heads  # two norms in and out, q, k, v, attention's result
    return L * block + 2 * N + V


def memory(model: GPTConfig, *, sequence: int, micro_batch: int, ranks: int, activation_bytes: int = FLOAT32) -> Memory:
    for name, value in (("ranks", ranks), ("micro-batch", micro_batch)):
        if value < 1:
            raise UserError(f"--{name} {value}: must be at least 1", fix=f"give a positive --{name}")
    total = flops.total(model)
    block = flops.non_embedding(model) / model.depth
    tokens = micro_batch * sequence
    # The softmax's gradient stands beside the logits for a moment; that is the peak with a large vocabulary.
    activations = tokens * (saved_per_token(model) * activation_bytes + 2 * model.vocabulary * FLOAT32)
    return Memory(
        state=STATE * FLOAT32 * total / ranks,
        gathered=2 * FLOAT32 * max(block, model.vocabulary * model.width) if ranks > 1 else 0.0,
        activations=activations,
        checkpoint=CHECKPOINT * FLOAT32 * total,
    )
