"""A sweep as a frame: a CSV of anybody's, its columns by whatever names they have, and what makes it unusable."""

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import polars as pl

from completep.errors import UserError, some
from completep.files import open_regular

HYPERPARAMETERS = ("lr", "std", "eps", "weight_decay")
LARGEST = 2**53  # beyond, a float is not every whole number
MOST_BYTES, MOST_COLUMNS = 2**28, 10_000  # of a CSV
SMALLEST_LOSS = 1e-100
LONGEST = 1000  # characters of the name of a column or of rules
PACKED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x9c", b"\x78\xda", b"\x28\xb5\x2f\xfd")  # gzip, zlib, zstd
RESERVED = ("rules", "width", "depth", "seed", "loss")
# What other people call them, for suggestions.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "loss": ("validation_loss", "val_loss", "eval_loss", "valid_loss", "test_loss", "final_loss", "train_loss", "loss"),
    "width": ("n_embd", "d_model", "hidden_size", "hidden_dim", "embed_dim", "model_dim", "n_embed", "dim", "width"),
    "depth": ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "layers", "blocks", "depth"),
    "seed": ("run_seed", "random_seed", "rng_seed", "trial", "seed"),
    "rules": ("parametrization", "parameterization", "scheme", "method"),
    "lr": ("learning_rate", "base_lr", "max_lr", "peak_lr", "eta", "lr"),
    "std": ("init_std", "initializer_range", "sigma", "std"),
    "eps": ("adam_eps", "adam_epsilon", "epsilon", "eps"),
    "weight_decay": ("wd", "decay", "weight_decay"),
}


def read_sweep(path: Path, names: Mapping[str, str] | None = None) -> pl.DataFrame:
    """A CSV of any sweep: width, depth (or one of them), a hyperparameter, loss; seed and rules where there are
    several. `names` says what the file calls them.

    A loss that is no number (`nan`, `diverged`) is a run that diverged; a blank is a run that was not done.
    """
    try:
        _refuse_size(path)
        frame = pl.read_csv(path, infer_schema=False, null_values=[""])
    except UserError:
        raise
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path} cannot be read as CSV: {first}", fix="give a file with a header line") from error
    plain = [c.replace('""', '"').strip().lower() for c in frame.columns]  # polars leaves doubled quotes in names
    repeated = sorted(n for n, count in Counter(plain).items() if count > 1)
    if len(plain) > MOST_COLUMNS:
        raise UserError(f"{path} has {len(plain)} columns", fix=f"give at most {MOST_COLUMNS} columns")
    if long := [name for name in plain if len(name) > LONGEST]:
        what = f"{path} has a column whose name has {len(long[0])} characters: {long[0][:40]!r}…"
        raise UserError(what, fix=f"give names of at most {LONGEST} characters")
    if repeated or frame.is_empty():
        what = f"several columns called {repeated[0]!r}" if repeated else "no rows"
        raise UserError(f"{path} has {what}", fix="give one column of each name, and a line for each run")
    frame = named(frame.rename(dict(zip(frame.columns, plain, strict=True))), names or {})
    numbers = [c for c in frame.columns if c != "rules"]
    cast = frame.with_columns(pl.col(c).str.strip_chars().cast(pl.Float64, strict=False) for c in numbers)
    if "loss" in frame.columns:
        cast = cast.with_columns(loss=pl.when(frame["loss"].is_not_null()).then(pl.col("loss").fill_null(np.nan)))
    for column in [c for c in ("width", "depth", "seed") if c in frame.columns]:
        size = cast[column].abs()
        good = ((size == size.round()) & (size <= LARGEST)).fill_null(False)
        if column != "seed":
            good &= (cast[column] >= 1).fill_null(False)
        _refuse_rows(path, frame, column, good, "a whole number" + ("" if column == "seed" else " of at least 1"))
        cast = cast.with_columns(pl.col(column).cast(pl.Int64))
    if "rules" in frame.columns:
        short = (frame["rules"].str.len_chars() <= LONGEST).fill_null(True)
        _refuse_rows(path, frame, "rules", short, f"a name of at most {LONGEST} characters")
        return cast.with_columns(pl.col("rules").fill_null("none"))
    return cast


def _refuse_size(path: Path) -> None:
    """Polars would unpack a compressed file without a word: a small one can fill the memory."""
    with open_regular(path) as file:
        if file.read(8).startswith(PACKED):
            raise UserError(f"{path} is compressed", fix="unpack it, and give the CSV itself")
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise UserError(f"{path} has more than {MOST_BYTES} bytes", fix="leave out columns that are not needed")


def named(frame: pl.DataFrame, names: Mapping[str, str]) -> pl.DataFrame:
    """The frame with our names for the columns in `names`. Another column of that name is left out."""
    role_of: dict[str, str] = {}
    for role, wanted in names.items():
        column = next((c for c in frame.columns if wanted in (c, c.strip())), None)
        column = column or next((c for c in frame.columns if c.strip().lower() == wanted.strip().lower()), None)
        if column is None:
            close = difflib.get_close_matches(wanted, frame.columns, 1)
            hint = f"{role}={close[0]!r}" if close else suggestion(role, frame.columns)
            raise UserError(f"no column {wanted!r} for {role}; {listing(frame)}", fix=f"name one of them: {hint}")
        if column in role_of:
            raise UserError(
                f"{role_of[column]} and {role} cannot both be the column {column!r}", fix="name two columns"
            )
        role_of[column] = role
    hidden = [role for role in role_of.values() if role in frame.columns and role not in role_of]
    return frame.drop(hidden).rename(role_of)


def suggestion(role: str, columns: Iterable[str]) -> str:
    """`loss='val_loss'`: a column of the file that may be what is missing, or how to name one."""
    plain = {c: re.sub(r"[^a-z0-9]+", "_", c.lower()).strip("_") for c in columns}
    for alias in ALIASES.get(role, (role,)):
        for column, name in plain.items():
            if name == alias or name.endswith(f"_{alias}"):
                return f"{role}={column!r}"
    close = difflib.get_close_matches(role, plain.values(), 1, 0.7)
    column = next((c for c, name in plain.items() if close and name == close[0]), "COLUMN")
    return f"{role}={column!r}"


def listing(frame: pl.DataFrame) -> str:
    return f"the columns are {some(frame.columns, 12)}"


def _refuse_rows(path: Path, frame: pl.DataFrame, column: str, good: pl.Series, wanted: str) -> None:
    if not good.all():
        row = int(good.not_().arg_true()[0])
        raise UserError(
            f"{path}, line {row + 2}: {column} is {frame[column][row]!r}, not {wanted}",
            fix="correct the line or leave it out",
        )


def find_hyperparameter(frame: pl.DataFrame, wanted: str | None) -> str:
    """The column that was swept."""
    if wanted is not None:
        if wanted not in frame.columns:
            same = [c for c in frame.columns if c.strip().lower() == wanted.strip().lower()]
            if len(same) == 1:  # the names of a file are read in lower case
                return same[0]
            close = difflib.get_close_matches(wanted, frame.columns, 1)
            hint = close[0] if close else next((c for c in frame.columns if c not in RESERVED), "lr")
            raise UserError(f"no column {wanted!r}; {listing(frame)}", fix=f"name one of them: {hint}, for instance")
        return wanted
    varied = [h for h in HYPERPARAMETERS if h in frame.columns and frame[h].n_unique() > 1]
    if len(varied) == 1:
        return varied[0]
    which = f"several vary: {', '.join(varied)}" if varied else f"none of {', '.join(HYPERPARAMETERS)} varies"
    hints = [suggestion(h, frame.columns) for h in HYPERPARAMETERS]
    hinted = next((h for h in hints if "COLUMN" not in h and h.split("=")[0] not in frame.columns), None)
    raise UserError(
        f"which hyperparameter was swept? {which}; {listing(frame)}",
        fix=f"name it: {hinted}" if hinted and not varied else "name it: hyperparameter lr, for instance",
    )


def usable(frame: pl.DataFrame, hyperparameter: str) -> pl.DataFrame:
    """The runs that were done, with every column that a verdict needs."""
    missing = [c for c in (hyperparameter, "loss") if c not in frame.columns]
    if not missing and not {"width", "depth"} & set(frame.columns):
        missing = ["width", "depth"]
    if missing:
        hints = ", ".join(suggestion(role, frame.columns) for role in missing)
        raise UserError(f"the sweep lacks {' and '.join(missing)}; {listing(frame)}", fix=f"name the column: {hints}")
    if hyperparameter in RESERVED:
        raise UserError(f"{hyperparameter!r} is not a hyperparameter", fix="name the column that was swept, such as lr")
    for column in (hyperparameter, "loss"):
        if not frame[column].dtype.is_numeric():
            raise UserError(
                f"the column {column!r} does not hold numbers", fix="cast it to floats, with NaN for diverged"
            )
    frame = complete(frame).filter(pl.col("loss").is_not_null())
    if frame.is_empty():
        raise UserError("no run of the sweep has a loss", fix="add the losses, with NaN for runs that diverged")
    frame = frame.with_columns(pl.col("rules").cast(pl.String).fill_null("none"))
    if frame[hyperparameter].null_count():
        raise UserError(f"some values of {hyperparameter} are not numbers", fix="write them as 0.0039 or 3.9e-3")
    if (frame["loss"].fill_nan(1.0) < SMALLEST_LOSS).any():
        raise UserError(
            f"some losses are not above 0, or below {SMALLEST_LOSS:g}: regret is a share of the loss",
            fix="give cross-entropies",
        )
    _refuse_mixtures(frame, hyperparameter)
    return frame


def _refuse_mixtures(frame: pl.DataFrame, hyperparameter: str) -> None:
    """Two runs of one setting and seed differ in something that is not looked at. Their mean would be meaningless."""
    key = [c for c in ("rules", "width", "depth", hyperparameter, "seed") if c in frame.columns]
    if frame.select(key).is_duplicated().any():
        others = [c for c in frame.columns if c not in (*key, "loss") and frame[c].n_unique() > 1]
        hint = suggestion("seed", others)
        seed = "" if "seed" in key else f", or name the column of seeds: {hint}"
        raise UserError(
            "several runs have the same " + ", ".join(key) + (f"; {others[0]} varies too" if others else ""),
            fix=f"give one run of each: filter the file first{seed}",
        )


def complete(frame: pl.DataFrame) -> pl.DataFrame:
    """With the columns that a small sweep leaves out."""
    absent = {"rules": "sweep", "width": 1, "depth": 1}
    return frame.with_columns(pl.lit(value).alias(name) for name, value in absent.items() if name not in frame.columns)
