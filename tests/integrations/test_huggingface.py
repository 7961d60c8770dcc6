"""Exported folders give the same logits and text in plain transformers, for every architecture."""

import json
import subprocess
import sys

import pytest
import torch

from completep.cli import main
from completep.config import GPTConfig
from completep.data.tokenizer import load_tokenizer
from completep.errors import UserError
from completep.integrations.huggingface import TARGETS, export, own_source
from completep.integrations.runs import load_run
from completep.model.gpt import GPT
from completep.train.loop import How, train
from tests.train.runs import small_data, small_run

transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")
pytestmark = pytest.mark.filterwarnings("ignore")  # from transformers
LLAMA = {"positions": "rotary", "activation": "swiglu", "norm": "rmsnorm"}
CASES = {
    "paper": ({}, "CompletePForCausalLM"),
    "paper tied": ({"tied": True}, "CompletePForCausalLM"),
    "llama": (LLAMA | {"bias": False}, "LlamaForCausalLM"),
    "llama with biases": (LLAMA, "LlamaForCausalLM"),
    "llama tied": (LLAMA | {"bias": False, "tied": True}, "LlamaForCausalLM"),
    "qwen3": (LLAMA | {"bias": False, "qk_norm": True}, "Qwen3ForCausalLM"),
    "biased qk norm": (LLAMA | {"qk_norm": True}, "CompletePForCausalLM"),
    "nemotron": ({"positions": "rotary"}, "NemotronForCausalLM"),
    "nemotron without biases": ({"positions": "rotary", "bias": False}, "NemotronForCausalLM"),
    "gpt2": ({"positions": "learned", "activation": "gelu"}, "GPT2LMHeadModel"),
    "gpt2 without biases": ({"positions": "learned", "activation": "gelu", "bias": False}, "GPT2LMHeadModel"),
    "experts": ({"experts": 4, "active_experts": 2}, "CompletePForCausalLM"),
    "llama with experts": (LLAMA | {"experts": 4}, "CompletePForCausalLM"),
    "no positions": ({"positions": "none", "activation": "gelu"}, "CompletePForCausalLM"),
}


def model(**options):
    torch.manual_seed(0)
    made = GPT(GPTConfig(width=64, depth=3, vocabulary=256, head_size=16, context=128, **options))
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.15)
    for m in made.modules():
        if isinstance(m, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
            torch.nn.init.normal_(m.weight, 1.0, 0.1)
    return made.eval()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_and_text(case, tmp_path):
    options, name = CASES[case]
    ours, words = model(**options), load_tokenizer("bytes")
    assert export(ours, words, tmp_path / "hf") == name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    assert type(theirs).__name__ == name
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, exported = ours(tokens), theirs(input_ids=tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(exported, expected, atol=1e-5, rtol=1e-5)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def f(x):\n    return x  # naïve café ☕"
    ids = read(text)["input_ids"]
    assert ids == words.encode(text).tolist()
    assert read.decode(ids) == text
    generated = theirs.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    by_hand = list(ids)
    with torch.no_grad():
        for _ in range(5):
            by_hand.append(int(ours(torch.tensor([by_hand]))[0, -1].argmax()))
    assert generated[0].tolist() == by_hand[: len(generated[0])]


@pytest.mark.slow
def test_padding_on_the_left_changes_nothing(tmp_path):
    ours = model()
    export(ours, load_tokenizer("bytes"), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    tokens = torch.randint(256, (1, 12))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 12, dtype=torch.long)], 1)
    with torch.no_grad():
        masked = theirs(input_ids=padded, attention_mask=mask).logits[:, 5:]
        unmasked = theirs(input_ids=padded).logits[:, 5:]
        expected = ours(tokens)
    torch.testing.assert_close(masked, expected, atol=1e-5, rtol=1e-5)
    assert (unmasked - expected).abs().max() > 1e-2


@pytest.mark.slow
def test_a_trained_run_is_exported_and_loads_without_this_package(tmp_path, capsys):
    run = small_run(small_data(tmp_path / "d"))
    train(run, tmp_path / "run", How(peak=1e11))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trust_remote_code"] is True
    ours, words = load_run(tmp_path / "run")
    code = (
        "import sys, json; sys.modules['completep'] = None\n"
        "import torch, transformers\n"
        "m = transformers.AutoModelForCausalLM.from_pretrained('hf', trust_remote_code=True).eval()\n"
        "t = transformers.AutoTokenizer.from_pretrained('hf', trust_remote_code=True)\n"
        "ids = t('the quick brown', return_tensors='pt').input_ids\n"
        "with torch.no_grad(): print(json.dumps(m(input_ids=ids).logits[0, -1].tolist()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    exported = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    with torch.no_grad():
        expected = ours(torch.tensor([words.encode("the quick brown").astype("int64").tolist()]))[0, -1]
    torch.testing.assert_close(exported, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_gpt2_tokenizer(tmp_path):
    pytest.importorskip("tiktoken")
    words = load_tokenizer("gpt2")
    torch.manual_seed(0)
    big = GPT(GPTConfig(width=16, depth=1, vocabulary=words.vocabulary, head_size=16, **LLAMA))
    export(big, words, tmp_path / "hf")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("Hello world", "  naïve  café\n\n☕ 12345 don't"):
        assert read(text)["input_ids"] == words.encode(text).tolist()
    assert read.eos_token_id == words.end
    named = "x<|endoftext|>y"  # transformers reads it as the end token; in a corpus it is plain text
    assert words.end in read(named)["input_ids"]
    assert words.end not in words.encode(named)


def test_bytes_are_bytes(tmp_path):
    """Also the characters that byte-level vocabularies use for other bytes; and the end token is not a character."""
    words = load_tokenizer("bytes")
    export(model(), words, tmp_path / "hf")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("Ābols ā", "".join(map(chr, range(1, 0x180))), "naïve ☕ 日本", "a\0b"):
        assert read(text)["input_ids"] == words.encode(text).tolist()
        assert read.decode(read(text)["input_ids"]).replace("<|end|>", "\0") == text
    assert read.eos_token_id == words.end == 0


def test_a_users_tokenizer_is_exported_as_it_was_trained_with(tmp_path):
    """Without the tokens around a text, truncation and padding that the file asks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[S]": 2, "</s>": 3}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[S]", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="[S] $A </s>", special_tokens=[("[S]", 2), ("</s>", 3)])
    made.enable_truncation(3)
    made.save(str(tmp_path / "tokenizer.json"))
    assert made.encode("a b b a").ids == [2, 0, 3]
    words = load_tokenizer(str(tmp_path / "tokenizer.json"))
    export(model(), words, tmp_path / "hf")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert read("a b b a")["input_ids"] == words.encode("a b b a").tolist() == [0, 1, 1, 0]


def test_without_tokenizers_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="tokenizers") as error:
        export(model(), load_tokenizer("bytes"), tmp_path / "hf")
    assert "completep[hf]" in error.value.fix
    assert not (tmp_path / "hf").exists()


def test_an_existing_folder_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    for taken in (tmp_path / "full", tmp_path / "full" / "x"):
        with pytest.raises(UserError, match="exists already"):
            export(model(), load_tokenizer("bytes"), taken)
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "y")]) == 2


def test_at_most_one_architecture_fits():
    from itertools import product

    kinds = (("alibi", "rotary", "learned", "none"), ("relu2", "gelu", "swiglu"), ("layernorm", "rmsnorm"))
    for p, a, n, b, q in product(*kinds, (True, False), (True, False)):
        config = GPTConfig(64, 2, 256, 16, p, 128, a, n, b, q)
        assert sum(t.fits(config) for t in TARGETS) <= 1


def test_the_source_does_not_need_this_package():
    compile(own_source(), "modeling_completep.py", "exec")
    assert "completep." not in own_source().replace("completep export", "").split('"""', 2)[2]
