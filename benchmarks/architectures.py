"""Models that the check was not tuned on: small random ones of many families, as functions of width and depth.

Each is built by its own library from a config, with heads of 16. `python benchmarks/architectures.py` lists them.
"""

import math
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
Builder = Callable[[int, int], nn.Module]
HEAD, VOCABULARY, LONGEST = 16, 256, 160


def transformer(kind: str, *, groups: int = 1, head_dim: bool = True, ffn: int = 3, **options: object) -> Builder:
    """A causal LM of a transformers family whose config has the usual names."""

    def build(width: int, depth: int) -> nn.Module:
        import transformers

        sizes = {
            "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // HEAD,
            "intermediate_size": ffn * width, "num_key_value_heads": max(1, width // HEAD // groups),
        }  # fmt: skip
        if head_dim:
            sizes["head_dim"] = HEAD
        common = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "tie_word_embeddings": False}
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        named = {k: v(depth) if callable(v) else v for k, v in options.items()}
        config = getattr(transformers, f"{kind}Config")(**{**common, **special, **sizes, **named})
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


def full_attention(depth: int) -> list[str]:
    return ["full_attention"] * depth


def gpt2(width: int, depth: int, tied: bool = True) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=width, n_layer=depth, n_head=width // HEAD, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def gptj(width: int, depth: int) -> nn.Module:
    import transformers

    config = transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=width, n_layer=depth, n_head=width // HEAD, rotary_dim=8,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def opt(width: int, depth: int) -> nn.Module:
    return transformer(
        "OPT", head_dim=False, word_embed_proj_dim=width, ffn_dim=4 * width, dropout=0.0, attention_dropout=0.0,
    )(width, depth)  # fmt: skip


def bloom(width: int, depth: int) -> nn.Module:
    import transformers

    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=width, n_layer=depth, n_head=width // HEAD, hidden_dropout=0,
        attention_dropout=0, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def mpt(width: int, depth: int) -> nn.Module:
    import transformers

    config = transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=width, n_layers=depth, n_heads=width // HEAD, max_seq_len=LONGEST
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def falcon(width: int, depth: int) -> nn.Module:
    import transformers

    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // HEAD,
        multi_query=False, parallel_attn=True, hidden_dropout=0, attention_dropout=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def deepseek_dense(width: int, depth: int) -> nn.Module:
    """DeepSeek-V3's latent attention, with dense blocks only."""
    return transformer(
        "DeepseekV3", head_dim=False, kv_lora_rank=width // 2, q_lora_rank=width // 2, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=HEAD, first_k_dense_replace=depth, rope_scaling=None,
    )(width, depth)  # fmt: skip


class ViT(nn.Module):
    """A plain vision transformer: patches, learned places, a mean over tokens."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.image_size = 32
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(
            width, width // HEAD, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


class Attention(nn.Module):
    """Grouped queries, rotary places and per-head norms on queries and keys, written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.groups = width // HEAD, width // HEAD // 2
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, self.groups * HEAD, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = rotate(self.q_norm(self.wq(x).view(batch, time, self.heads, HEAD).transpose(1, 2)))
        k = rotate(self.k_norm(self.wk(x).view(batch, time, self.groups, HEAD).transpose(1, 2)))
        v = self.wv(x).view(batch, time, self.groups, HEAD).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] / 100 ** torch.linspace(0, 1, HEAD // 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ByHand(nn.Module):
    """A decoder as one writes it today."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Convolutional(nn.Module):
    """Blocks of a causal convolution and an MLP, without attention."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width), "mix": nn.Conv1d(width, width, 4), "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(depth)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = x + block["mix"](F.pad(block["norm"](x).transpose(1, 2), (3, 0))).transpose(1, 2)
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return self.head(self.norm(x))


GRANITE = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
ARCHITECTURES: dict[str, Builder] = {
    "Llama, grouped queries": transformer("Llama", groups=2),
    "Llama, tied": transformer("Llama", tie_word_embeddings=True),
    "Llama, two key heads at every width": transformer("Llama", num_key_value_heads=2),
    "Qwen3, one key head at every width": transformer("Qwen3", num_key_value_heads=1),
    "Mistral": transformer("Mistral", groups=2, sliding_window=None),
    "Qwen2": transformer("Qwen2", head_dim=False, groups=2),
    "Qwen3": transformer("Qwen3", groups=2),
    "Gemma": transformer("Gemma"),
    "Gemma2": transformer("Gemma2", query_pre_attn_scalar=HEAD, layer_types=full_attention),
    "Gemma3": transformer("Gemma3Text", groups=2, query_pre_attn_scalar=HEAD, layer_types=full_attention),
    "OLMo": transformer("Olmo", head_dim=False),
    "OLMo2": transformer("Olmo2", head_dim=False),
    "GPT-NeoX": transformer("GPTNeoX", head_dim=False, ffn=4),
    "GPT-NeoX, sequential": transformer("GPTNeoX", head_dim=False, use_parallel_residual=False),
    "GPT-2, tied": gpt2,
    "GPT-J": gptj,
    "OPT": opt,
    "BLOOM": bloom,
    "MPT": mpt,
    "Falcon": falcon,
    "Phi": transformer("Phi", head_dim=False),
    "Phi3": transformer("Phi3", head_dim=False),
    "Cohere": transformer("Cohere", head_dim=False),
    "Cohere2": transformer("Cohere2", head_dim=False, layer_types=full_attention),
    "Starcoder2": transformer("Starcoder2", head_dim=False, groups=2),
    "StableLM": transformer("StableLm", head_dim=False, groups=2),
    "Granite": transformer("Granite", head_dim=False, **GRANITE),
    "GLM4": transformer("Glm4", groups=2),
    "Exaone4": transformer("Exaone4", groups=2, layer_types=full_attention, sliding_window=None),
    "Nemotron": transformer("Nemotron", head_dim=False),
    "Helium": transformer("Helium"),
    "SmolLM3": transformer("SmolLM3", head_dim=False, groups=2, layer_types=full_attention),
    "Arcee": transformer("Arcee"),
    "DeepSeek-V3, dense": deepseek_dense,
    "ViT": ViT,
    "by hand": ByHand,
    "convolutional": Convolutional,
}


if __name__ == "__main__":
    for name, build in ARCHITECTURES.items():
        print(f"{name}: {sum(math.prod(p.shape) for p in build(64, 2).parameters()):,} parameters at 64 × 2")
