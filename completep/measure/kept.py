"""What a derivation has measured already, kept in a folder: the same call continues where a killed one stopped.

A measurement is kept under the digest of everything that determines it: the factory and what its model computes, the
settings, the shape, the seeds, the provisional rules, and the code that measures. What is damaged is measured again.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch

from completep.anatomy.trace import call, find_logits
from completep.config import sealed, unsealed
from completep.errors import UserError
from completep.files import make_folder, read_text, write_over
from completep.measure.subject import Setting, Source, random_batch, speaking_of
from completep.measure.survey import AttentionRow, Job, Measured
from completep.measure.tensors import State, TensorRow
from completep.rules.table import Column, Role

MEASURING = ("anatomy", "rules", "measure")  # the packages that decide what is measured


class Kept:
    """Measurements of one factory under one setting."""

    def __init__(self, folder: Path, source: Source, setting: Setting) -> None:
        self.identity = _digest(_about(source), repr(setting), _fingerprint(source, setting), _code())
        self.folder = folder / f"derive-{self.identity[:16]}"
        make_folder(self.folder)

    def get(self, job: Job) -> Measured | None:
        """None if it was not measured yet."""
        path = self._path(job)
        if not path.exists():
            return None
        try:
            return _read(unsealed(read_text(path)))
        except (UserError, ValueError, TypeError, KeyError):
            return None

    def put(self, job: Job, measured: Measured) -> None:
        seeds = {seed: [asdict(state), [asdict(row) for row in rows]] for seed, (state, rows) in measured.seeds.items()}
        attentions = [asdict(row) for row in measured.attentions]
        content = {"job": str(job), "seeds": seeds, "attentions": attentions, "untrained": measured.untrained}
        write_over(self._path(job), sealed(content))

    def loss(self, key: str, steps: int) -> float | None:
        """What `put_loss` was given for this run of training."""
        path = self._loss_path(key, steps)
        try:
            return float(unsealed(read_text(path))["loss"]) if path.exists() else None
        except (UserError, ValueError, TypeError, KeyError):
            return None

    def put_loss(self, key: str, steps: int, loss: float) -> None:
        write_over(self._loss_path(key, steps), sealed({"run": key, "loss": loss}))

    def _loss_path(self, key: str, steps: int) -> Path:
        return self.folder / f"loss-{_digest(key, str(steps))[:24]}.json"

    def _path(self, job: Job) -> Path:
        rules = (job.rules.key, job.rules.named, job.rules.axes)
        what = (
            rules,
            job.shape,
            job.seeds,
            job.limit,
            sorted(job.repairs.items()),
            sorted(job.grown.items()),
            job.steps,
        )
        return self.folder / f"{_digest(repr(what))[:24]}.json"


def _about(source: Source) -> str:
    factory = source.factory
    name = factory if isinstance(factory, str) else f"{factory.__module__}:{getattr(factory, '__qualname__', factory)}"
    return repr((name, source.base, sorted(source.arguments.items()), source.names, source.roles))


def _fingerprint(source: Source, setting: Setting) -> str:
    """The parameters of the base, and what it makes of a batch, so that a changed model is measured anew."""
    with speaking_of("the base"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = source.base_model().eval()
        logits = find_logits(call(model, random_batch(source, model, setting, 0)[0]))
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return _digest(repr(shapes), "" if logits is None else repr(logits.double().flatten().tolist()))


def _code() -> str:
    package = Path(__file__).parents[1]
    files = sorted(path for part in MEASURING for path in (package / part).glob("*.py"))
    return _digest(torch.__version__, *(path.read_text() for path in files))


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _read(content: Mapping[str, object]) -> Measured:
    seeds = {
        int(seed): (State(**state), [_row(row) for row in rows])
        for seed, (state, rows) in content["seeds"].items()  # type: ignore[attr-defined]
    }
    attentions = [AttentionRow(**row) for row in content["attentions"]]  # type: ignore[attr-defined]
    return Measured(seeds, attentions, list(content["untrained"]))  # type: ignore[call-overload]


def _row(content: Mapping[str, object]) -> TensorRow:
    if content.keys() != {f.name for f in fields(TensorRow)}:
        raise ValueError("a row of another version")
    kinds = {"role": Role(str(content["role"])), "column": Column(str(content["column"]))}
    return TensorRow(**{**content, **kinds})  # type: ignore[arg-type]
