"""Models as their authors wrote them, small and random: each is a function of width and depth."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from completep import COMPLETEP, Role, parametrize

VOCABULARY = 61


def huggingface(kind: str, **options):
    """A causal LM of this family, as AutoModelForCausalLM builds it from a config."""

    def build(width: int, depth: int) -> nn.Module:
        import transformers

        named = {k: v(width, depth) if callable(v) else v for k, v in options.items()}
        special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        config = getattr(transformers, kind + "Config")(vocab_size=VOCABULARY, **special, **named)
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


LLAMA_LIKE = {
    "hidden_size": lambda n, _: n,
    "num_hidden_layers": lambda _, depth: depth,
    "num_attention_heads": lambda n, _: n // 16,
    "num_key_value_heads": lambda n, _: n // 32,
    "intermediate_size": lambda n, _: 3 * n,
    "head_dim": 16,
}
GRANITE = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
NEOX_LIKE = {k: v for k, v in LLAMA_LIKE.items() if k not in ("num_key_value_heads", "head_dim")}


def gpt2(width, depth):
    return huggingface("GPT2", n_embd=width, n_layer=depth, n_head=width // 16, n_positions=32)(width, depth)


def opt(width, depth):
    return huggingface(
        "OPT", hidden_size=width, word_embed_proj_dim=width, num_hidden_layers=depth, num_attention_heads=width // 16,
        ffn_dim=4 * width, max_position_embeddings=32,
    )(width, depth)  # fmt: skip


def mpt(width, depth):
    return huggingface("Mpt", d_model=width, n_layers=depth, n_heads=width // 16, max_seq_len=32)(width, depth)


def bloom(width, depth):
    return huggingface("Bloom", hidden_size=width, n_layer=depth, n_head=width // 16)(width, depth)


def vision_packages():
    """timm, with the Python part of torchvision. Its compiled operators are only declared."""
    folder = Path(sys.prefix) / "vision"
    if not (folder / "timm").is_dir():
        pytest.skip(f"timm is not in {folder}; make test installs it")
    if "timm" not in sys.modules:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        vision_packages.library = library  # the declarations live as long as this does
        sys.path.append(str(folder))
        try:
            import timm  # noqa: F401
            import torchvision  # noqa: F401
        finally:
            sys.path.remove(str(folder))
    return sys.modules["timm"], sys.modules["torchvision"]


def timm_vit(width, depth, pool="token"):
    timm, _ = vision_packages()
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": width, "depth": depth, "num_heads": width // 16}
    return timm.models.VisionTransformer(**sizes, num_classes=10, global_pool=pool)


def timm_vit_average(width, depth):
    return timm_vit(width, depth, "avg")


def torchvision_vit(width, depth):
    _, torchvision = vision_packages()
    return torchvision.models.VisionTransformer(16, 8, depth, width // 16, width, 4 * width, num_classes=10)


class TorchEncoderLM(nn.Module):
    """A plain nn.TransformerEncoder as a causal language model."""

    def __init__(self, width, depth, norm_first=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, 0.1, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        time = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        x = self.tokens(ids) + self.places(torch.arange(time))
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class Squash(nn.Module):
    """A norm with an unusual name: RMS with a gain named g."""

    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.g * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class SquashNorm(Squash):
    pass


class Mixer(nn.Module):
    """Bare parameters and einsum: no nn.Linear in sight."""

    def __init__(self, width):
        super().__init__()
        self.wander = nn.Parameter(torch.randn(width // 16, 16, width) / math.sqrt(width))
        self.gather = nn.Parameter(torch.randn(width // 16, 16, width) / math.sqrt(width))

    def forward(self, x):
        h = torch.einsum("btn,hdn->bthd", x, self.wander)
        h = h.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None, None]
        return torch.einsum("bthd,hdn->btn", h, self.gather)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.calm_a, self.calm_b = SquashNorm(width), SquashNorm(width)
        self.mixer = Mixer(width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.mixer(self.calm_a(x))
        return x + self.shrink(F.silu(self.expand(self.calm_b(x))))


class Oddity(nn.Module):
    """Unusual names throughout. Blocks are attributes, and each adds to the stream itself."""

    def __init__(self, width, depth):
        super().__init__()
        self.glyphs = nn.Embedding(VOCABULARY, width)
        self.depth = depth
        for i in range(depth):
            self.add_module(f"storey{i}", Layer(width))
        self.calm = SquashNorm(width)
        self.speak = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.glyphs(ids)
        for i in range(self.depth):
            x = self.get_submodule(f"storey{i}")(x)
        return self.speak(self.calm(x))


class OuterSum(nn.Module):
    """The sum is outside the blocks: x = x + block(x)."""

    def __init__(self, width, depth):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.table(ids)
        for branch in self.branches:
            x = x + branch(x)
        return self.out(self.norm(x))


MOE = {"num_experts_per_tok": 2}
PLAIN = {k: v for k, v in LLAMA_LIKE.items() if k != "head_dim"}
LATENT = {
    "kv_lora_rank": lambda n, _: n // 2, "q_lora_rank": lambda n, _: n // 2, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, object] = {
    "mixtral": huggingface("Mixtral", num_local_experts=4, **MOE, **LLAMA_LIKE),
    "qwen3-moe": huggingface("Qwen3Moe", num_experts=4, moe_intermediate_size=lambda n, _: n, **MOE, **LLAMA_LIKE),
    "olmoe": huggingface("Olmoe", num_experts=4, **MOE, **PLAIN),
    "gpt-oss": huggingface("GptOss", num_local_experts=8, **MOE, **LLAMA_LIKE),
    "deepseek-v3": huggingface(
        "DeepseekV3", n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=1,
        moe_intermediate_size=lambda n, _: n, **MOE, **LATENT, **PLAIN,
    ),
    "granite-moe": huggingface("GraniteMoe", num_local_experts=4, **MOE, **PLAIN),
    "llama4": huggingface(
        "Llama4Text", num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1,
        intermediate_size_mlp=lambda n, _: 2 * n, no_rope_layers=lambda _, depth: [1] * depth, **LLAMA_LIKE,
    ),
}  # fmt: skip

MAMBA2 = {
    "mamba_d_head": 16, "mamba_n_heads": lambda n, _: 2 * n // 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}  # fmt: skip
LINEAR_ATTENTION = {
    "linear_num_value_heads": lambda n, _: n // 8, "linear_num_key_heads": lambda n, _: n // 16,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


def alternating(*kinds):
    """The kind of every layer; the same mix at every depth that is a multiple of their number."""
    return lambda _, depth: [kinds[i % len(kinds)] for i in range(depth)]


HYBRIDS: dict[str, object] = {
    "nanochat": huggingface("NanoChat", **LLAMA_LIKE),
    "mamba": huggingface(
        "Mamba", hidden_size=lambda n, _: n, num_hidden_layers=lambda _, depth: depth, state_size=8,
        time_step_rank=lambda n, _: n // 8,
    ),
    "mamba2": huggingface(
        "Mamba2", hidden_size=lambda n, _: n, num_hidden_layers=lambda _, depth: depth, state_size=8, head_dim=16,
        num_heads=lambda n, _: 2 * n // 16, n_groups=1, chunk_size=8,
    ),
    "bamba": huggingface("Bamba", attn_layer_indices=lambda _, d: list(range(1, d, 2)), **MAMBA2, **PLAIN),
    "granite-hybrid": huggingface(
        "GraniteMoeHybrid", num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=lambda n, _: 2 * n,
        layers_block_type=alternating("mamba", "attention"), **MAMBA2, **PLAIN,
    ),
    "lfm2": huggingface(
        "Lfm2", layer_types=alternating("conv", "full_attention"), block_auto_adjust_ff_dim=False, **PLAIN
    ),
    "falcon-h1": huggingface("FalconH1", mamba_d_ssm=lambda n, _: 2 * n, **MAMBA2, **PLAIN),
    "qwen3-next": huggingface(
        "Qwen3Next", num_experts=4, moe_intermediate_size=lambda n, _: n,
        shared_expert_intermediate_size=lambda n, _: n, layer_types=alternating("linear_attention", "full_attention"),
        **MOE, **LINEAR_ATTENTION, **LLAMA_LIKE,
    ),
    "qwen3.5": huggingface(
        "Qwen3_5Text", layer_types=alternating("linear_attention", "full_attention"), **LINEAR_ATTENTION, **LLAMA_LIKE
    ),
    "recurrent-gemma": huggingface(
        "RecurrentGemma", lru_width=lambda n, _: n, block_types=["recurrent", "attention"], attention_window_size=16,
        **PLAIN,
    ),
    "jamba": huggingface(
        "Jamba", mamba_d_state=8, mamba_dt_rank=lambda n, _: n // 8, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, num_experts=4, **MOE, **PLAIN,
    ),
}  # fmt: skip


def modernbert(width, depth):
    """With its MLM head: norm, layer, GELU, norm, tied readout."""
    import transformers

    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 16,
        intermediate_size=2 * width, max_position_embeddings=32, global_attn_every_n_layers=1, **special,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config)


def classifier(width, depth):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 16,
        num_key_value_heads=width // 16, intermediate_size=2 * width, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config)


def dinov2(width, depth):
    """A vision transformer with layer scales."""
    import transformers

    config = transformers.Dinov2Config(
        image_size=16, patch_size=8, num_labels=3, hidden_size=width, num_hidden_layers=depth,
        num_attention_heads=width // 16, mlp_ratio=2, use_mask_token=False,
    )  # fmt: skip
    return transformers.Dinov2ForImageClassification(config)


HEADS = {"modernbert": modernbert, "sequence-classification": classifier, "dinov2-vit": dinov2}

ODD_ROLES = {"storey*.mixer.*": "HIDDEN"}

ZOO = {
    "gpt2": gpt2,
    "llama": huggingface("Llama", **LLAMA_LIKE),
    "qwen3": huggingface("Qwen3", **LLAMA_LIKE),
    "neox": huggingface("GPTNeoX", **NEOX_LIKE),
    "neox-sequential": huggingface("GPTNeoX", use_parallel_residual=False, **NEOX_LIKE),
    "opt": opt,
    "gemma": huggingface("Gemma", **LLAMA_LIKE),
    "gemma2": huggingface("Gemma2", **LLAMA_LIKE),
    "gemma3": huggingface("Gemma3Text", **LLAMA_LIKE),
    "olmo2": huggingface("Olmo2", **{k: v for k, v in LLAMA_LIKE.items() if k != "head_dim"}),
    "phi": huggingface("Phi", **NEOX_LIKE),
    "granite": huggingface("Granite", **GRANITE, **NEOX_LIKE),
    "bloom": bloom,
    "mpt-alibi": mpt,
    "torch-encoder": TorchEncoderLM,
    "timm-vit": timm_vit,
    "timm-vit-average": timm_vit_average,
    "torchvision-vit": torchvision_vit,
    "oddity": Oddity,
    "outer-sum": OuterSum,
    **EXPERTS,
    **HYBRIDS,
    **HEADS,
}

QUICK = ("gpt2", "llama", "gemma", "torch-encoder", "oddity", "outer-sum")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ZOO]


def roles_for(name):
    return {pattern: Role[role] for pattern, role in ODD_ROLES.items()} if name == "oddity" else None


def scale(name, style="multiplier", rules=COMPLETEP, width=64, depth=6):
    """(a model of the zoo, its scaling relative to width 32 and depth 2)"""
    torch.manual_seed(0)  # some constructor values are random and kept
    model = ZOO[name](width, depth)
    return model, parametrize(model, base=lambda: ZOO[name](32, 2), rules=rules, style=style, roles=roles_for(name))
