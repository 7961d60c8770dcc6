"""A trained decoder as a Hugging Face folder: an architecture that transformers has where one fits exactly, else its own source.

What fits: rotary + SwiGLU + RMSNorm is Llama (with QK norms Qwen3), rotary + ReLU² + LayerNorm is Nemotron, learned positions + GELU +
LayerNorm is GPT-2. They divide attention by sqrt(d_head), ours by d_head: the other root goes into the queries. ALiBi with ReLU² (the
paper's own) is nobody's: BLOOM and MPT have ALiBi but GELU, and Falcon scales ALiBi with the logits. Those are written with the
decoder's own source beside the weights, for `trust_remote_code=True`. Weights are folded, so no multiplier is needed anywhere.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from completep import config as configuration
from completep.config import GPTConfig
from completep.data.tokenizer import Tokenizer, gpt2_files, spelled_bytes
from completep.errors import UserError
from completep.files import write_new
from completep.model import gpt as decoder
from completep.model.gpt import GPT

Weights = dict[str, Tensor]
EPS = 1e-5  # of every norm
END = "<|end|>"  # of a text of bytes


@dataclass(frozen=True)
class Target:
    """How one architecture of transformers spells our decoder."""

    name: str  # its class
    fits: Callable[[GPTConfig], bool]
    settings: Callable[[GPTConfig], dict[str, Any]]
    weights: Callable[[GPTConfig, Weights], Weights]


def common(c: GPTConfig) -> dict[str, Any]:
    return {
        "hidden_size": c.width, "intermediate_size": c.feed_forward, "num_hidden_layers": c.depth, "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads, "head_dim": c.head_size, "vocab_size": c.vocabulary, "max_position_embeddings": c.context,
        "tie_word_embeddings": c.tied,
    }  # fmt: skip


def llama_settings(c: GPTConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    bias = {"attention_bias": c.bias, "mlp_bias": c.bias}
    return {
        **common(c),
        **bias,
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_parameters": rope,
    }


def qwen3_settings(c: GPTConfig) -> dict[str, Any]:
    return {**llama_settings(c), "model_type": "qwen3", "attention_bias": False}


def nemotron_settings(c: GPTConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    bias = {"attention_bias": c.bias, "mlp_bias": c.bias}
    return {
        **common(c),
        **bias,
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "norm_eps": EPS,
        "rope_parameters": rope,
    }


def gpt2_settings(c: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": c.width, "n_inner": c.feed_forward, "n_layer": c.depth, "n_head": c.heads,
        "vocab_size": c.vocabulary,
        "n_positions": c.context, "activation_function": "gelu", "layer_norm_epsilon": EPS, "tie_word_embeddings": c.tied,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


NAMES = {  # ours → Llama's and its kin's, inside a block
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention.out": "self_attn.o_proj",
    "mlp.up": "mlp.up_proj", "mlp.gate": "mlp.gate_proj", "mlp.down": "mlp.down_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
}  # fmt: skip


def llama_weights(c: GPTConfig, ours: Weights) -> Weights:
    root = c.head_size**-0.5  # of the two that make 1 / d_head
    theirs: Weights = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "lm_head.weight": ours["unembedding.weight"],
    }
    for name, value in ours.items():
        if name.startswith("final_norm."):
            theirs[name.replace("final_norm", "model.norm")] = value
        elif name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            module, _, kind = rest.rpartition(".")
            if module == "attention.qkv":
                q, k, v = value.chunk(3)
                q = q if c.qk_norm else q * root
                theirs |= {
                    f"model.layers.{layer}.self_attn.{x}_proj.{kind}": part
                    for x, part in (("q", q), ("k", k), ("v", v))
                }
            else:
                value = value * root if module == "attention.q_norm" else value
                theirs[f"model.layers.{layer}.{NAMES[module]}.{kind}"] = value
    return theirs


def nemotron_weights(c: GPTConfig, ours: Weights) -> Weights:
    """Its norms are stored less one, and always have a bias."""
    theirs = llama_weights(c, ours)
    for name in [n for n in theirs if "norm.weight" in n or "layernorm.weight" in n]:
        theirs[name] = theirs[name] - 1
        theirs.setdefault(name.replace(".weight", ".bias"), torch.zeros(c.width))
    return theirs


def gpt2_weights(c: GPTConfig, ours: Weights) -> Weights:
    """Its matrices are stored transposed, and everything has a bias."""
    theirs: Weights = {
        "transformer.wte.weight": ours["embedding.weight"], "transformer.wpe.weight": ours["positions.weight"],
        "transformer.ln_f.weight": ours["final_norm.weight"], "lm_head.weight": ours["unembedding.weight"],
        "transformer.ln_f.bias": ours.get("final_norm.bias", torch.zeros(c.width)),
    }  # fmt: skip
    places = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for layer in range(c.depth):
        for mine, its in places.items():
            weight = ours[f"blocks.{layer}.{mine}.weight"]
            bias = ours.get(f"blocks.{layer}.{mine}.bias", torch.zeros(weight.shape[0]))
            if mine == "attention.qkv":
                factor = torch.ones(len(weight))
                factor[: c.width] = c.head_size**-0.5
                weight, bias = weight * factor[:, None], bias * factor
            theirs[f"transformer.h.{layer}.{its}.weight"] = weight.T if weight.dim() == 2 else weight
            theirs[f"transformer.h.{layer}.{its}.bias"] = bias
    return theirs


def is_llama(c: GPTConfig) -> bool:
    return (c.positions, c.activation, c.norm) == ("rotary", "swiglu", "rmsnorm")


TARGETS = (
    Target("LlamaForCausalLM", lambda c: is_llama(c) and not c.qk_norm, llama_settings, llama_weights),
    Target("Qwen3ForCausalLM", lambda c: is_llama(c) and c.qk_norm and not c.bias, qwen3_settings, llama_weights),
    Target(
        "NemotronForCausalLM",
        lambda c: (c.positions, c.activation, c.norm, c.qk_norm) == ("rotary", "relu2", "layernorm", False),
        nemotron_settings,
        nemotron_weights,
    ),
    Target(
        "GPT2LMHeadModel",
        lambda c: (c.positions, c.activation, c.norm, c.qk_norm) == ("learned", "gelu", "layernorm", False),
        gpt2_settings,
        gpt2_weights,
    ),
)


def export(model: GPT, tokenizer: Tokenizer, folder: Path) -> str:
    """Write config.json, model.safetensors and the tokenizer; the name of the architecture."""
    from safetensors.torch import save

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already", fix="export to a new folder")
    spoken = tokenizer_files(tokenizer)  # what may be missing is missed before anything is written
    c = model.config
    ours = {name: p.detach().cpu().float() for name, p in model.state_dict().items()}
    target = next((t for t in TARGETS if t.fits(c)), None)
    ends = {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    if target is not None:
        settings, weights = target.settings(c), target.weights(c, ours)
        name = target.name
    else:
        settings, weights = own_settings(c), {f"gpt.{n}": p for n, p in ours.items()}
        name = "CompletePForCausalLM"
        write_new(folder / "modeling_completep.py", own_source())
    if c.tied:
        weights = {n: p for n, p in weights.items() if n not in ("lm_head.weight", "gpt.unembedding.weight")}
    settings |= {**ends, "architectures": [name], "dtype": "float32"}
    write_new(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    write_new(folder / "model.safetensors", save({n: p.contiguous() for n, p in weights.items()}, {"format": "pt"}))
    write_new(folder / "generation_config.json", json.dumps(ends, indent=2) + "\n")
    for file, text in spoken.items():
        write_new(folder / file, text)
    return name


def own_settings(c: GPTConfig) -> dict[str, Any]:
    auto = {
        "AutoConfig": "modeling_completep.CompletePConfig",
        "AutoModelForCausalLM": "modeling_completep.CompletePForCausalLM",
    }
    return {"model_type": "completep", "auto_map": auto, "gpt": asdict(c), "tie_word_embeddings": c.tied}


WRAPPER = """

class CompletePConfig(PreTrainedConfig):
    model_type = "completep"

    def __init__(self, gpt=None, **kwargs):
        self.gpt = gpt or {}
        plain = GPTConfig(**self.gpt)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = plain.vocabulary, plain.width, plain.depth
        super().__init__(**kwargs)


class CompletePForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = CompletePConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        plain = GPTConfig(**config.gpt)
        self.gpt = GPT(plain)
        if plain.tied:
            self._tied_weights_keys = {"gpt.unembedding.weight": "gpt.embedding.weight"}
        self.post_init()

    def get_input_embeddings(self):
        return self.gpt.embedding

    def get_output_embeddings(self):
        return self.gpt.unembedding

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask}  # no cache: all of it is read again

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        places = None
        if attention_mask is not None and not bool(attention_mask.all()):
            there = attention_mask.bool()
            position = (there.long().cumsum(-1) - 1).clamp(min=0)
            t = torch.arange(input_ids.shape[1], device=input_ids.device)
            sees = (t[:, None] >= t[None, :])[None] & there[:, None, :] | torch.eye(len(t), dtype=torch.bool, device=t.device)
            places = Places(position, sees)
        x = self.gpt.final_norm(self.gpt.stream(input_ids, places))
        logits = self.gpt.unembedding(x * self.gpt.logit_multiplier)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)
"""


def own_source() -> str:
    """The decoder's own source with what transformers wants around it: one file that needs neither this package nor anything else."""
    imports = (
        "from dataclasses import dataclass\nfrom typing import Literal\n\nimport torch\nimport torch.nn.functional as F\n"
        "from torch import Tensor, nn\nfrom transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel\n"
        "from transformers.modeling_outputs import CausalLMOutput\n\n\n"
        "class UserError(ValueError):\n    def __init__(self, what, *, fix):\n        super().__init__(f'{what}; {fix}')\n\n\n"
    )
    body = inspect.getsource(decoder)
    body = body[
        body.index("def norm(") : body.index("def gpt(")
    ]  # after the imports, before the command line's factory
    title = (
        f'"""{(decoder.__doc__ or "").strip()}\n\nWritten by completep export; trained weights are folded in."""\n\n'
    )
    return title + imports + inspect.getsource(configuration.GPTConfig) + "\n\n" + body.rstrip() + "\n" + WRAPPER


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """tokenizer.json and what transformers reads beside it. Bytes are a byte-level vocabulary without merges."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("the package tokenizers is not installed", fix="pip install 'completep[hf]'") from error
    if tokenizer.name == "bytes":
        made = bytes_tokenizer()
    elif tokenizer.name == "gpt2":
        made = gpt2_tokenizer()
    else:
        made = tokenizers.Tokenizer.from_file(tokenizer.name)
    # As in training: texts as they are, with nothing put around them, cut off or filled up.
    made.post_processor = tokenizers.processors.Sequence([])
    made.no_truncation()
    made.no_padding()
    end = END if tokenizer.name == "bytes" else made.id_to_token(tokenizer.end)
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(words, indent=2) + "\n"}


def bytes_tokenizer() -> Any:
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    # Texts end with byte 0, which such vocabularies spell Ā; as the name of the end it would be found in every text with this letter.
    spelled = spelled_bytes() | {0: END}
    made = Fast(models.BPE(vocab={c: b for b, c in spelled.items()}, merges=[]))
    made.normalizer = normalizers.Replace("\0", END)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, normalized=True)])
    return made


def gpt2_tokenizer() -> Any:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    found = gpt2_files()
    lines = (line.partition(" ") for line in found["vocab.bpe"].decode().split("\n")[1:] if line)
    pairs = [(left, right) for left, _, right in lines]
    made = Fast(models.BPE(vocab=json.loads(found["encoder.json"]), merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made
