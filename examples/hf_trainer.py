"""A Llama from a config: trained with Hugging Face's Trainer, folded, saved, and loaded by plain transformers.

python -m examples.hf_trainer [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, get_linear_schedule_with_warmup

import completep as cp
from completep.data.builtin import builtin_corpus
from completep.data.sampler import Sampler

STEPS, BATCH, TIME = 50, 8, 64


def llama(width: int, depth: int) -> torch.nn.Module:
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 16,
    }
    config = LlamaConfig(
        vocab_size=256,
        num_key_value_heads=width // 16,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config)


def batches() -> list[dict[str, torch.Tensor]]:
    sampler = Sampler(builtin_corpus(), "train", TIME, BATCH, seed=0)
    rows = [torch.from_numpy(row[:-1]) for step in range(STEPS) for row in sampler.batch_at(step)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder: Path) -> tuple[float, float, str]:
    torch.manual_seed(0)
    model = llama(width=64, depth=4)
    scaling = cp.parametrize(model, base=lambda: llama(width=32, depth=2))  # it needs nothing else
    scaling.init_(std=0.1, seed=0)
    optimizer = torch.optim.AdamW(scaling.param_groups(lr=2**-6, eps=1e-12), betas=(0.9, 0.95))
    schedule = get_linear_schedule_with_warmup(optimizer, STEPS // 5, STEPS)
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        logging_steps=10,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        max_grad_norm=0.0,  # to clip, use scaling.clip_grad_norm_: a plain norm depends on the style
    )
    trainer = Trainer(model, arguments, train_dataset=batches(), optimizers=(optimizer, schedule))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    scaling.fold(optimizer)  # from here on an ordinary Llama
    model.save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([list(b"def ")])
    tokens = plain.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    return float(losses[0]), float(losses[-1]), bytes(tokens[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        first, last, text = main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
    print(f"loss {first:.3f} → {last:.3f}; plain transformers continues: {text!r}")
