"""A run's folder → the trained model and the tokenizer of its data."""

from pathlib import Path

import torch

from completep import paper
from completep.config import Run, run_from_json
from completep.data.tokenizer import Tokenizer, load_tokenizer
from completep.errors import UserError
from completep.files import read_text
from completep.model.gpt import GPT
from completep.train.export import load_exported
from completep.train.loop import open_corpus


def accelerator() -> torch.device:
    """Where a model is evaluated: on a GPU where there is one."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load_run(folder: Path, tokenizer: str | None = None, device: torch.device | None = None) -> tuple[GPT, Tokenizer]:
    model = load_exported(folder).eval().to(device or torch.device("cpu"))
    words = load_tokenizer(tokenizer) if tokenizer is not None else run_tokenizer(folder)
    if words.vocabulary > model.config.vocabulary:
        raise UserError(
            f"the tokenizer {words.name} has {words.vocabulary} ids, the model of {folder} only {model.config.vocabulary}",
            fix="give the tokenizer that it was trained with: --tokenizer",
        )
    return model, words


def run_of(folder: Path) -> Run:
    return run_from_json(read_text(folder / "run.json"), str(folder / "run.json"))


def longest_text(folder: Path, wanted: int | None) -> int:
    """Tokens that the model can read: ALiBi is made to go on past what was trained on; other positions are not."""
    run = run_of(folder)
    trained = max(run.sequence, paper.SEQUENCE) if run.model.positions == "alibi" else run.sequence
    return min(wanted or trained, run.model.context) if run.model.positions == "learned" else wanted or trained


def run_tokenizer(folder: Path) -> Tokenizer:
    """By the run's data: the built-in corpus names its tokenizer, a prepared folder carries its own."""
    run = run_of(folder)
    if run.data.source == "python":
        return load_tokenizer(run.data.tokenizer)
    try:
        return open_corpus(run.data).tokenizer()
    except UserError as error:
        raise UserError(error.what, fix="bring the data back, or name its tokenizer: --tokenizer gpt2") from error
