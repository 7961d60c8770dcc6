"""A run's folder → the trained model and the tokenizer of its data."""

from pathlib import Path

import torch

from completep import paper
from completep.config import BUILTIN, Run
from completep.data.tokenizer import Tokenizer, load_tokenizer
from completep.errors import UserError
from completep.model.gpt import GPT
from completep.train.export import load_exported
from completep.train.folder import RUN, read_run
from completep.train.settings import open_corpus


def accelerator() -> torch.device:
    """The GPU or other accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load_run(folder: Path, tokenizer: str | None = None, device: torch.device | None = None) -> tuple[GPT, Tokenizer]:
    """The trained model and its tokenizer, or the tokenizer of the given name."""
    model = load_exported(folder).eval().to(device or torch.device("cpu"))
    loaded = load_tokenizer(tokenizer) if tokenizer is not None else run_tokenizer(folder)
    if loaded.vocabulary > model.config.vocabulary:
        sizes = f"{loaded.vocabulary} ids, the model of {folder} only {model.config.vocabulary}"
        what = f"the tokenizer {loaded.name} has {sizes}"
        raise UserError(what, fix="give the tokenizer that the model was trained with")
    return model, loaded


def run_of(folder: Path) -> Run:
    return read_run(folder / RUN)


def longest_text(folder: Path, wanted: int | None) -> int:
    """The number of tokens to read at once: `wanted`, or what the model was trained on.

    ALiBi extrapolates to longer texts than were trained on. Learned positions have an upper limit.
    """
    run = run_of(folder)
    trained = max(run.sequence, paper.SEQUENCE) if run.model.positions == "alibi" else run.sequence
    return min(wanted or trained, run.model.context) if run.model.positions == "learned" else wanted or trained


def run_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the run's data: named in the run for the built-in corpus, else in the prepared folder."""
    run = run_of(folder)
    if run.data.source in BUILTIN:
        return load_tokenizer(run.data.tokenizer)
    try:
        return open_corpus(run.data).tokenizer()
    except UserError as error:
        raise UserError(error.what, fix="restore the data, or give the tokenizer: bytes, gpt2 or a file") from error
