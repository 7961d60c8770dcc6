"""The paper's decoder: pre-norm, untied, ALiBi, ReLU², LayerNorm with biases, attention logits divided by d_head.

The model applies two multipliers. The rules compute them and set them with `set_multipliers`. Its MLP may be a mixture
of experts.

Shapes: B batch, T time, N width, H heads, D head size, F feed-forward width, V vocabulary, E experts, K active experts,
S tokens of the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from completep.config import GPTConfig, default_head_size
from completep.errors import UserError

SMALL_VOCABULARY = 1024  # up to this size, computing all logits at once is faster and takes little memory


def norm(config: GPTConfig, size: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=1e-5)
    return nn.LayerNorm(size, bias=config.bias)


def alibi_slopes(heads: int) -> Tensor:
    """Press et al. 2021: a geometric sequence. Other head counts than powers of two follow their reference code."""

    def powers(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    closest = 1 << (heads.bit_length() - 1)
    return torch.tensor(powers(closest) + powers(2 * closest)[0::2][: heads - closest])


def alibi_mask(heads: int, distance_BTT: Tensor, dtype: torch.dtype) -> Tensor:
    """A penalty that is linear in the distance; later tokens, at a negative distance, are masked.

    The mask is 4-D because the fast CPU kernel of attention does not take a 3-D mask.
    """
    slopes_H11 = alibi_slopes(heads).to(distance_BTT.device, dtype)[:, None, None]
    seen_BTT = distance_BTT.to(dtype).masked_fill(distance_BTT < 0, float("inf"))
    return -slopes_H11 * seen_BTT[:, None]


@dataclass(frozen=True)
class Places:
    """Positions and visibility of tokens that are not a plain sequence, such as several endings of one beginning."""

    position_BT: Tensor
    sees_BQT: Tensor  # which tokens the last Q tokens attend to; the tokens before them are a plain sequence

    def distance(self) -> Tensor:
        """Distance from each of the last Q tokens back to every token; -1 where it does not attend to it."""
        own_BQ = self.position_BT[:, self.position_BT.shape[1] - self.sees_BQT.shape[1] :]
        return (own_BQ[:, :, None] - self.position_BT[:, None, :]).masked_fill(~self.sees_BQT, -1)


Mask = Tensor | None  # added to the attention logits; None means causal attention, which the kernels implement


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | tuple[Mask, Tensor], scale: float) -> Tensor:
    """Scaled dot-product attention. Of two masks, the second is for the last tokens, and the first for those before."""
    if isinstance(mask, tuple):
        first, last = mask
        cut = q.shape[2] - last.shape[2]
        y = attend(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], first, scale)
        return torch.cat((y, attend(q[:, :, cut:], k, v, last, scale)), dim=2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)


def rotate(x_BHTD: Tensor, position_BT: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021). The two halves of a head form the rotated pairs."""
    size = x_BHTD.shape[-1]
    frequency = 10000 ** (-torch.arange(0, size, 2, device=x_BHTD.device, dtype=torch.float32) / size)
    angle = position_BT.float()[:, None, :, None] * frequency
    cos, sin = angle.cos().to(x_BHTD.dtype), angle.sin().to(x_BHTD.dtype)
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size, self.rotary = config.head_size, config.positions == "rotary"
        # 1/d_head, not 1/sqrt(d_head), in every parameterization: trained queries and keys align (paper, Methodology).
        self.scale = 1.0 / config.head_size
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.q_norm = norm(config, config.head_size) if config.qk_norm else None
        self.k_norm = norm(config, config.head_size) if config.qk_norm else None
        self.kernel: Callable[[Tensor, float], Tensor] | None = None  # in training on a CPU: train/fused.py

    def forward(self, x_BTN: Tensor, mask: Mask | tuple[Mask, Tensor], position_BT: Tensor) -> Tensor:
        batch, time, _ = x_BTN.shape
        heads = self.qkv(x_BTN).view(batch, time, 3, -1, self.head_size)
        if self.kernel is not None:
            return self.write(self.kernel(heads, self.scale))
        q_BHTD, k_BHTD, v_BHTD = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTD, k_BHTD = self.q_norm(q_BHTD), self.k_norm(k_BHTD)
        if self.rotary:
            q_BHTD, k_BHTD = rotate(q_BHTD, position_BT), rotate(k_BHTD, position_BT)
        y_BHTD = attend(q_BHTD, k_BHTD, v_BHTD, mask, self.scale)
        return self.write(y_BHTD.transpose(1, 2))

    def write(self, y_BTHD: Tensor) -> Tensor:
        out: Tensor = self.out(y_BTHD.flatten(2))
        return out


Kernel = Callable[[Tensor], Tensor]


def activated(h: Tensor, gate: Tensor | None, activation: str, kernel: Kernel | None) -> Tensor:
    """The nonlinearity of an MLP."""
    if gate is not None:
        return F.silu(gate) * h
    if kernel is not None:
        return kernel(h)
    if activation == "relu2":
        h = F.relu(h)
        return h * h  # square() has a backward pass that is twice as slow on a CPU
    return F.gelu(h)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig, inner: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.kernel: Kernel | None = None  # in training on a CPU: train/fused.py
        width, bias = config.width, config.bias
        self.up = nn.Linear(width, inner, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if config.activation == "swiglu" else None
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x_BTN: Tensor) -> Tensor:
        gate_BTF = None if self.gate is None else self.gate(x_BTN)
        out: Tensor = self.down(activated(self.up(x_BTN), gate_BTF, self.activation, self.kernel))
        return out


class Experts(nn.Module):
    """All experts of a block: one tensor per matrix, without biases."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        experts, width, inner = config.experts, config.width, config.expert_size
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.gate = nn.Parameter(torch.empty(experts, width, inner)) if config.activation == "swiglu" else None
        self.down = nn.Parameter(torch.empty(experts, inner, width))
        for matrices in self.parameters():
            nn.init.normal_(matrices, std=matrices.shape[1] ** -0.5)

    def forward(self, x_SN: Tensor, share_SK: Tensor, chosen_SK: Tensor, kernel: Kernel | None) -> Tensor:
        made_SN = torch.zeros_like(x_SN)
        for expert in range(len(self.up)):
            token, place = torch.where(chosen_SK == expert)
            x = x_SN[token]
            gate = None if self.gate is None else x @ self.gate[expert]
            h = activated(x @ self.up[expert], gate, self.activation, kernel)
            made_SN = made_SN.index_add(0, token, (h @ self.down[expert]) * share_SK[token, place, None])
        return made_SN


class Mixture(nn.Module):
    """A router sends every token to its best experts.

    Gates are sigmoids, divided by the number of active experts, so that what the mixture returns does not depend on
    the number of experts (Jiang et al., arXiv 2601.20205).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kernel: Kernel | None = None  # in training on a CPU: train/fused.py
        self.active = config.active_experts
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared = MLP(config, config.shared_experts * config.expert_size) if config.shared_experts else None

    def forward(self, x_BTN: Tensor) -> Tensor:
        x_SN = x_BTN.flatten(0, 1)
        score_SK, chosen_SK = self.router(x_SN).topk(self.active, -1)
        share_SK = torch.sigmoid(score_SK) / self.active
        made_BTN: Tensor = self.experts(x_SN, share_SK, chosen_SK, self.kernel).view_as(x_BTN)
        return made_BTN if self.shared is None else made_BTN + self.shared(x_BTN)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.multiplier = 1.0
        self.kernel: Callable[[Block, Tensor], Tensor] | None = None  # in training on a CPU: train/fused.py
        self.attention_norm, self.attention = norm(config, config.width), Attention(config)
        mlp = Mixture(config) if config.experts else MLP(config, config.feed_forward)
        self.mlp_norm, self.mlp = norm(config, config.width), mlp

    def forward(self, x_BTN: Tensor, mask: Mask | tuple[Mask, Tensor], position_BT: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(self, x_BTN)
        x_BTN = torch.add(x_BTN, self.attention(self.attention_norm(x_BTN), mask, position_BT), alpha=self.multiplier)
        return torch.add(x_BTN, self.mlp(self.mlp_norm(x_BTN)), alpha=self.multiplier)


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in chunks if that is faster: for a vocabulary larger than the width, and enough tokens."""
    vocabulary, width = weight.shape
    if vocabulary <= SMALL_VOCABULARY:
        return F.cross_entropy(x @ weight.t(), targets)
    chunked = vocabulary > 4 * width and len(x) >= width and torch.is_grad_enabled()
    # On a CPU the default chunking is three times slower; no other size is faster than 256 tokens.
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=256, acc_policy="compact") if chunked else None
    return F.linear_cross_entropy(x, weight, targets, options=options)


class GPT(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.logit_multiplier = 1.0
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_norm = norm(config, config.width)
        self.unembedding = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.unembedding.weight = self.embedding.weight

    def set_multipliers(self, *, branch: float, logits: float) -> None:
        self.logit_multiplier = logits
        for block in self.blocks:
            block.multiplier = branch  # type: ignore[assignment]

    def get_multipliers(self) -> tuple[float, float]:
        return float(self.blocks[0].multiplier), self.logit_multiplier  # type: ignore[arg-type]

    def stream(self, tokens_BT: Tensor, places: Places | None = None) -> Tensor:
        """The residual stream after the last block."""
        x_BTN: Tensor = self.embedding(tokens_BT)
        position_BT = torch.arange(tokens_BT.shape[1], device=x_BTN.device)[None]
        if places is not None:
            position_BT = places.position_BT
        if self.positions is not None:
            longest = tokens_BT.shape[1] if places is None else int(position_BT.max()) + 1
            if longest > self.config.context:
                raise UserError(
                    f"a sequence of {longest} tokens is longer than the {self.config.context} learned positions",
                    fix="use a shorter sequence, a larger context, or positions='alibi'",
                )
            x_BTN = x_BTN + self.positions(position_BT)
        mask = self.mask(position_BT, places, x_BTN.dtype)
        for block in self.blocks:
            x_BTN = block(x_BTN, mask, position_BT)
        return x_BTN

    def mask(self, position_BT: Tensor, places: Places | None, dtype: torch.dtype) -> Mask | tuple[Mask, Tensor]:
        if places is None or places.sees_BQT.shape[1] == 0:
            return self.causal_mask(position_BT, dtype)
        alibi = self.config.positions == "alibi"
        last = alibi_mask(self.config.heads, places.distance(), dtype) if alibi else places.sees_BQT[:, None]
        before = position_BT.shape[1] - last.shape[2]
        return (self.causal_mask(position_BT[:1, :before], dtype), last) if before else last

    def causal_mask(self, position_BT: Tensor, dtype: torch.dtype) -> Mask:
        distance_BTT = position_BT[:, :, None] - position_BT[:, None, :]
        return alibi_mask(self.config.heads, distance_BTT, dtype) if self.config.positions == "alibi" else None

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits; with targets, the mean cross-entropy, for which a large vocabulary is processed in chunks."""
        x_BTN: Tensor = self.final_norm(self.stream(tokens_BT))
        if self.logit_multiplier != 1.0:
            x_BTN = x_BTN * self.logit_multiplier
        if targets_BT is not None:
            return cross_entropy(x_BTN.flatten(0, 1), self.unembedding.weight, targets_BT.flatten())
        logits_BTV: Tensor = self.unembedding(x_BTN)
        return logits_BTV


def gpt(width: int = 256, depth: int = 2, vocabulary: int = 50257, **options: object) -> GPT:
    """The reference decoder from its sizes: `gpt(width=1024, depth=24)`.

    By default heads have 64 dimensions, or fewer in narrow models, to have at least four heads. To compare several
    widths, give `head_size`, so it is the same in all of them.
    """
    known = set(GPTConfig.__dataclass_fields__)
    unknown = sorted(set(options) - known)
    if unknown:
        raise UserError(f"gpt() has no option {unknown[0]!r}", fix="use one of " + ", ".join(sorted(known)))
    options.setdefault("head_size", default_head_size(width))
    return GPT(GPTConfig(width=width, depth=depth, vocabulary=vocabulary, **options))  # type: ignore[arg-type]
