"""The command that continues or repeats a tuning, with all of its settings, for the report."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from completep.config import as_shape
from completep.sweep.backends import EngineName
from completep.tuning.result import shape_text
from completep.tuning.settings import GPT, Tuning, names_toml

Place = Path | str


def command_of(train: "str | Path | Callable[..., object]", tuning: Tuning, changes: Mapping[str, object]) -> list[str]:
    """The command of this tuning: the TOML file and the changes to it, or all settings that are not the defaults."""
    words = ["completep", "tune"]
    if names_toml(train):
        return [*words, str(train), *(w for name in changes if changes[name] is not None for w in flag(name, tuning))]
    words += [tuning.command or tuning.function] if not tuning.model else []
    empty = Tuning(model=GPT)
    changed = [f.name for f in fields(Tuning) if getattr(tuning, f.name) != getattr(empty, f.name)]
    names = [name for name in changed if name not in ("command", "function", "model")]
    return [
        *words,
        *(flag("model", tuning) if tuning.model else []),
        *(w for name in names for w in flag(name, tuning)),
    ]


def flag(name: str, tuning: Tuning) -> list[str]:
    """A setting as words of the command line."""
    value = getattr(tuning, name)
    option = "--base-shape" if name == "base" else f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    if name in ("space", "set"):
        texts = {k: ",".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v) for k, v in value.items()}
        return [option, *(f"{k}={text}" for k, text in texts.items())]
    if name == "proxies":
        return [option, *(shape_text(as_shape(p)) for p in value)]
    return [option, *map(str, value)] if isinstance(value, list) else [option, str(value)]


def engine_words(
    engine: EngineName,
    workers: int | None,
    per_gpu: int,
    address: str | None,
    slurm: Mapping[str, str],
    *,
    accept_changes: bool,
    out: Place,
) -> list[str]:
    words = ["--engine", engine] if engine != "local" else []
    words += ["--workers", str(workers)] if workers is not None else []
    words += ["--per-gpu", str(per_gpu)] if per_gpu != 1 else []
    words += ["--address", address] if address is not None else []
    words += ["--slurm", *(f"{k}={v}" for k, v in slurm.items())] if slurm else []
    words += ["--accept-changes"] if accept_changes else []
    return words + ([] if Path(out) == Path("runs") else ["--out", str(out)])
