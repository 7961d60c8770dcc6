"""A trained decoder → a Hugging Face folder, with an architecture of transformers if one fits exactly.

Rotary + SwiGLU + RMSNorm is Llama, or Qwen3 with QK norms. Rotary + ReLU² + LayerNorm is Nemotron. Learned positions +
GELU + LayerNorm is GPT-2. These divide attention logits by sqrt(d_head), ours by d_head, so the queries are scaled by
the other sqrt(d_head). No architecture has ALiBi with ReLU², which the paper uses: BLOOM and MPT have ALiBi with GELU,
and Falcon scales ALiBi with the logits. Such a model is written with its own source code next to the weights, for
`trust_remote_code=True`. Weights are folded, so no multiplier is needed.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from completep import config as configuration
from completep.config import GPTConfig
from completep.data.tokenizer import Tokenizer, gpt2_files, spelled_bytes
from completep.errors import UserError
from completep.files import write_new
from completep.model import gpt as decoder
from completep.model.gpt import GPT

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

Weights = dict[str, Tensor]
EPS = 1e-5  # of every norm
END = "<|end|>"  # the end token of the bytes tokenizer


@dataclass(frozen=True)
class Target:
    """An architecture of transformers, and how a decoder is converted to it."""

    name: str  # of its class
    fits: Callable[[GPTConfig], bool]
    settings: Callable[[GPTConfig], dict[str, Any]]
    weights: Callable[[GPTConfig, Weights], Weights]


def common(c: GPTConfig) -> dict[str, Any]:
    return {
        "hidden_size": c.width, "intermediate_size": c.feed_forward, "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads, "num_key_value_heads": c.heads, "head_dim": c.head_size,
        "vocab_size": c.vocabulary, "max_position_embeddings": c.context, "tie_word_embeddings": c.tied,
        "attention_bias": c.bias, "mlp_bias": c.bias,
    }  # fmt: skip


def llama_settings(c: GPTConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    specific = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": EPS, "rope_parameters": rope}
    return {**common(c), **specific}


def qwen3_settings(c: GPTConfig) -> dict[str, Any]:
    return {**llama_settings(c), "model_type": "qwen3", "attention_bias": False}


def nemotron_settings(c: GPTConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    specific = {"model_type": "nemotron", "hidden_act": "relu2", "norm_eps": EPS, "rope_parameters": rope}
    return {**common(c), **specific}


def gpt2_settings(c: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": c.width, "n_inner": c.feed_forward, "n_layer": c.depth, "n_head": c.heads,
        "vocab_size": c.vocabulary, "n_positions": c.context, "activation_function": "gelu",
        "layer_norm_epsilon": EPS, "tie_word_embeddings": c.tied,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


NAMES = {  # in a block: our names → the names in Llama and similar architectures
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention.out": "self_attn.o_proj",
    "mlp.up": "mlp.up_proj", "mlp.gate": "mlp.gate_proj", "mlp.down": "mlp.down_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
}  # fmt: skip


def llama_weights(c: GPTConfig, ours: Weights) -> Weights:
    root = c.head_size**-0.5  # the architecture multiplies by another one, which gives 1 / d_head
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
                parts = {"q": q if c.qk_norm else q * root, "k": k, "v": v}
                theirs |= {f"model.layers.{layer}.self_attn.{x}_proj.{kind}": part for x, part in parts.items()}
            else:
                value = value * root if module == "attention.q_norm" else value
                theirs[f"model.layers.{layer}.{NAMES[module]}.{kind}"] = value
    return theirs


def nemotron_weights(c: GPTConfig, ours: Weights) -> Weights:
    """Nemotron stores the weights of norms minus one, and its norms always have a bias."""
    theirs = llama_weights(c, ours)
    for name in [n for n in theirs if "norm.weight" in n or "layernorm.weight" in n]:
        theirs[name] = theirs[name] - 1
        theirs.setdefault(name.replace(".weight", ".bias"), torch.zeros(c.width))
    return theirs


def gpt2_weights(c: GPTConfig, ours: Weights) -> Weights:
    """GPT-2 stores matrices transposed, and every layer has a bias."""
    theirs: Weights = {
        "transformer.wte.weight": ours["embedding.weight"], "transformer.wpe.weight": ours["positions.weight"],
        "transformer.ln_f.weight": ours["final_norm.weight"], "lm_head.weight": ours["unembedding.weight"],
        "transformer.ln_f.bias": ours.get("final_norm.bias", torch.zeros(c.width)),
    }  # fmt: skip
    names = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for layer in range(c.depth):
        for our_name, their_name in names.items():
            weight = ours[f"blocks.{layer}.{our_name}.weight"]
            bias = ours.get(f"blocks.{layer}.{our_name}.bias", torch.zeros(weight.shape[0]))
            if our_name == "attention.qkv":
                factor = torch.ones(len(weight))
                factor[: c.width] = c.head_size**-0.5
                weight, bias = weight * factor[:, None], bias * factor
            theirs[f"transformer.h.{layer}.{their_name}.weight"] = weight.T if weight.dim() == 2 else weight
            theirs[f"transformer.h.{layer}.{their_name}.bias"] = bias
    return theirs


def is_llama(c: GPTConfig) -> bool:
    return (c.positions, c.activation, c.norm, c.qk_norm) == ("rotary", "swiglu", "rmsnorm", False)


def is_qwen3(c: GPTConfig) -> bool:
    kind = (c.positions, c.activation, c.norm, c.qk_norm, c.bias)
    return kind == ("rotary", "swiglu", "rmsnorm", True, False)


def is_nemotron(c: GPTConfig) -> bool:
    return (c.positions, c.activation, c.norm, c.qk_norm) == ("rotary", "relu2", "layernorm", False)


def is_gpt2(c: GPTConfig) -> bool:
    return (c.positions, c.activation, c.norm, c.qk_norm) == ("learned", "gelu", "layernorm", False)


TARGETS = (
    Target("LlamaForCausalLM", is_llama, llama_settings, llama_weights),
    Target("Qwen3ForCausalLM", is_qwen3, qwen3_settings, llama_weights),
    Target("NemotronForCausalLM", is_nemotron, nemotron_settings, nemotron_weights),
    Target("GPT2LMHeadModel", is_gpt2, gpt2_settings, gpt2_weights),
)


def export(model: GPT, tokenizer: Tokenizer, folder: Path) -> str:
    """Write config.json, model.safetensors and the tokenizer. Returns the name of the architecture."""
    from safetensors.torch import save

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already", fix="export to a new folder")
    texts = tokenizer_files(tokenizer)  # first, since it fails if a package is missing
    c = model.config
    ours = {name: p.detach().cpu().float() for name, p in model.state_dict().items()}
    target = next((t for t in TARGETS if t.fits(c) and not c.experts), None)
    ends = {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    if target is not None:
        name, settings, weights = target.name, target.settings(c), target.weights(c, ours)
    else:
        name, settings = "CompletePForCausalLM", own_settings(c)
        weights = {f"gpt.{n}": p for n, p in ours.items()}
        write_new(folder / "modeling_completep.py", own_source())
    if c.tied:
        weights = {n: p for n, p in weights.items() if n not in ("lm_head.weight", "gpt.unembedding.weight")}
    settings |= {**ends, "architectures": [name], "dtype": "float32"}
    write_new(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    write_new(folder / "model.safetensors", save({n: p.contiguous() for n, p in weights.items()}, {"format": "pt"}))
    write_new(folder / "generation_config.json", json.dumps(ends, indent=2) + "\n")
    for file, text in texts.items():
        write_new(folder / file, text)
    return name


def own_settings(c: GPTConfig) -> dict[str, Any]:
    classes = {"AutoConfig": "CompletePConfig", "AutoModelForCausalLM": "CompletePForCausalLM"}
    auto = {kind: f"modeling_completep.{name}" for kind, name in classes.items()}
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
        return {"input_ids": input_ids, "attention_mask": attention_mask}  # no cache: every step reads the whole text

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        places = None
        if attention_mask is not None and not bool(attention_mask.all()):
            present = attention_mask.bool()
            position = (present.long().cumsum(-1) - 1).clamp(min=0)
            t = torch.arange(input_ids.shape[1], device=input_ids.device)
            itself = torch.eye(len(t), dtype=torch.bool, device=t.device)
            sees = (t[:, None] >= t[None, :])[None] & present[:, None, :] | itself
            places = Places(position, sees)
        x = self.gpt.final_norm(self.gpt.stream(input_ids, places))
        logits = self.gpt.unembedding(x * self.gpt.logit_multiplier)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)
"""


IMPORTS = """
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class UserError(ValueError):
    def __init__(self, what, *, fix):
        super().__init__(f"{what}; {fix}")


"""


def own_source() -> str:
    """The decoder's source code and classes for transformers around it, in one file that does not need completep."""
    source = inspect.getsource(decoder)
    body = source[source.index("def norm(") : source.index("def gpt(")]  # without imports and the factory
    title = f'"""{(decoder.__doc__ or "").strip()}\n\nWritten by completep export. The weights are folded."""\n'
    config = [f"MOST = {configuration.MOST}\n"] + [
        inspect.getsource(part) for part in (configuration.whole, configuration.GPTConfig)
    ]
    return title + IMPORTS + "\n\n".join([*config, body.rstrip()]) + "\n" + WRAPPER


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json. The bytes tokenizer is a byte-level vocabulary without merges."""
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
    # As in training: no tokens around a text, no truncation and no padding.
    made.post_processor = tokenizers.processors.Sequence([])
    made.no_truncation()
    made.no_padding()
    end = END if tokenizer.name == "bytes" else made.id_to_token(tokenizer.end)
    ends = {"eos_token": end, "bos_token": end}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **ends, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def bytes_tokenizer() -> "FastTokenizer":
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    # Documents end with byte 0. Such vocabularies write it as Ā, but a special token Ā would match that letter in text.
    spelled = spelled_bytes() | {0: END}
    made = FastTokenizer(models.BPE(vocab={c: b for b, c in spelled.items()}, merges=[]))
    made.normalizer = normalizers.Replace("\0", END)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, normalized=True)])
    return made


def gpt2_tokenizer() -> "FastTokenizer":
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    files = gpt2_files()
    lines = (line.partition(" ") for line in files["vocab.bpe"].decode().split("\n")[1:] if line)
    pairs = [(left, right) for left, _, right in lines]
    made = FastTokenizer(models.BPE(vocab=json.loads(files["encoder.json"]), merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made
