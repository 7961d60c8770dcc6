"""What is fuzzed: command lines, run.json, CSVs, corpora, run folders, stores, packs and other files that people pass
on. Each case is a function of a `Random`.
"""

import gzip
import hashlib
import inspect
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random

import polars as pl

from completep.cli import COMMANDS, main
from completep.config import GPTConfig, Hyperparameters, Run, Schedule, Shape, sealed, to_json, unsealed
from completep.rules.measured import MeasuredRow, MeasuredRules
from completep.sweep.packing import pack
from completep.sweep.queue import ask
from completep.sweep.store import Store
from completep.train.records import Result
from completep.tuned import TunedValue, TunedValues, write_tuned
from completep.tuning.reading import Source
from completep.tuning.record import Known, write_record
from completep.tuning.tasks import Call, Command, Setting
from tests.hostile import plant

MODEL = """
import torch
from completep.model.gpt import gpt

def model(width=32, depth=2, vocabulary=61):
    return gpt(width, depth, vocabulary, head_size=16)

def pair(width=32, depth=2):
    m = model(width, depth)
    return m, torch.optim.AdamW(m.parameters(), lr=1e-3)

def linear(width=4, depth=1):
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])

def nothing():
    return None
"""

NAMES = [
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[/]", "[bold]x[/bold]", "[red", "]", "\\",
    "**x**", "| a | b |", "`x`", "# x", "- x", "1. x", "[a](javascript:alert(1))", "a.b[0]", "a['b']", 'a"b', "a,b",
    "\u202eabc", "\u2066x\u2069", "\u200b", "\ufeff", "\x1b[31mred", "\x1b]0;title\x07", "\x00", "\x7f", "\x85", "\r",
    "a\nb", "\ud800", "\udcff", ":smile:", "{0}", "%s", "%(x)s", "${x}", "{{x}}", "{% x %}", "&lt;", "\U0001f600",
    "=1+1", "@x", "https://x.example/", "ש", "e\u0301", "x" * 300, "", " ", "\t",
]  # fmt: skip
NUMBERS = [
    "0", "-0", "-1", "1", "2", "3", "nan", "inf", "-inf", "1e300", "-1e300", "1e19", "1e-400", "1e400", "9" * 50, "9"
    * 5000,
    "0x10", "1_000", "١", "1e", "2^-8", "2^9999", "-8^0.5", "0^-1", "1.5", "1,5", "5%", "1.5B", "-1B", "0K", "1e9Z",
    "2147483648",
]  # fmt: skip
WORDS = [
    "python", "completep", "sp", "mup", "alpha=0.5", "alpha=nan", "alpha=", "alpha=1e999", "literature=0.5",
    "flat-eps=1",
    "lr-transfer", "shape", "laziness", "coordinates", "lr=2^-8", "depth=2", "depth=1e300", "lr=-8^0.5", "seed=0,0",
    "seed=",
    "=", "a=", "=b", "width=[]", "width=32", "width='", "depth=" + "9" * 400, "--", "-", "-h", "--json", "laptop",
    "desk", "paper", "torch", "bytes",
    "none", "None", "True", "auto", "folded", "status", "model.py:model", "model.py:linear", "model.py:nothing",
    "model.py:torch",
    "model.py:", ":model", "os:system", "builtins:exit",
]  # fmt: skip
PLACES = [
    ".", "..", "nowhere", "nowhere/deeper", "file", "file/below", "folder", "locked", "locked/x", "/proc/self/mem",
    "/dev/null",
    "/dev/full", "dangling", "loop", "corpus", "corpus/manifest.json", "finished", "finished/run.json",
    "finished/result.json",
    "run.json", "runs.csv", "model.py", "x" * 5000, "a/" * 200, "latin\udcff", "[/]", "\x1b[31m",
]  # fmt: skip
# A run of two steps: 32 × 1 on a tiny corpus.
RUN = Run(
    GPTConfig(32, 1, 256, 8), Hyperparameters(0.01, 0.1), Schedule(2, 1), 2, 16, base=Shape(32, 1),
)  # fmt: skip
TINY = ["--width", "32", "--depth", "1", "--head-size", "8", "--tokens", "64", "--batch", "2", "--sequence", "16"]
TINY += ["--base-shape", "32", "1", "--data", "corpus", "--peak", "1e12"]


def prepare_world(root: Path) -> Path:
    """A folder with a corpus, a finished run, a store, files that cannot be used: what commands are pointed at."""
    root.mkdir(parents=True)
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (root / "more.txt").write_text("pack my box with five dozen liquor jugs\n" * 50)
    (root / "model.py").write_text(MODEL)
    (root / "file").write_text("x")
    (root / "folder").mkdir()
    (root / "locked").mkdir(mode=0o500)
    (root / "dangling").symlink_to("gone")
    (root / "loop").symlink_to("loop")
    with_bytes = os.fsencode(root) + b"/latin\xff"
    Path(os.fsdecode(with_bytes)).write_bytes(b"\xff\xfe")
    before = os.getcwd()
    os.chdir(root)
    try:
        code = main(["prepare", "text.txt", "more.txt", "--out", "corpus", "--validation", "0.5", "--workers", "1"])
        assert code == 0
        code = main(["train", *TINY, "--out", "finished", "--checkpoint-every", "1"])
        assert code == 0
    finally:
        os.chdir(before)
    (root / "run.json").write_text(to_json(RUN))
    rows = [
        f"completep,64,{d},{2.0**e},{s},{2 + 0.02 * (e + 6) ** 2 + s / 1000}"
        for d, e, s in product((2, 8), (-8, -7, -6, -5, -4), (0, 1))
    ]
    (root / "runs.csv").write_text("rules,width,depth,lr,seed,loss\n" + "\n".join(rows) + "\n")
    prepare_shared(root / "shared", root / "finished")
    return root


REPORT = ["lr-transfer", "--set", "seed=0", "depth=2,8"]


def prepare_shared(shared: Path, finished: Path) -> None:
    """What people pass on: a store with results of a study, a pack, values, rules, a TOML file, tables."""
    shared.mkdir()
    said = io.StringIO()
    with redirect_stdout(said):
        main(["study", *REPORT, "--dry-run", "--json", "--out", str(shared / "runs")])
    names = list(dict.fromkeys(run["run"] for run in json.loads(said.getvalue())["runs"]))
    store = Store(shared / "runs" / "store")
    store.open()
    for i, name in enumerate(names):
        (store.root / name).mkdir()
        result = Result("done", 10, 2.0, 2 + 0.01 * i, 640, 1.0, 640.0, "0" * 64, name)
        (store.root / name / "result.json").write_text(sealed(asdict(result)))
    store.write_index([Known(name) for name in names])
    trained = Store(shared / "trained" / "store")
    trained.open()
    name = unsealed((finished / "result.json").read_text())["run"]
    shutil.copytree(finished, trained.root / name, ignore=shutil.ignore_patterns("checkpoints", "*.safetensors"))
    pack(trained, shared / "pack.gz")
    queue = Store(shared / "queue" / "store")
    queue.open()
    setting = Setting(Shape(64, 2), Shape(64, 2), "completep", (("lr", 0.25),), 0)
    ask(queue, Command("true {lr} {width//2}", Source.parse("output:(x)"), setting, (), "/"))
    ask(queue, Call("model.py:nothing", setting, ()))
    values = {"lr": TunedValue(0.01, 0.005, 0.02), "weight_decay": TunedValue(0.1)}
    tuned = TunedValues(values, Shape(64, 2), "completep", "PASS", "", [Shape(64, 8)], "x", constants={"steps": 10})
    write_tuned(shared / "tuned.json", tuned)
    row = MeasuredRow("embedding.weight", {"lr": {"width": -0.5}}, {"lr": {"width": (-0.5, -0.6, -0.4)}})
    MeasuredRules("completep", (row,)).save(shared / "rules.json")
    write_record(shared / "runs" / "tunings" / "a.json", "a tuning", (), names[:3])
    (shared / "tune.toml").write_text(
        f'command = "{TUNE[0]}"\nloss = "output:(.*)"\nbase = [64, 2]\nseeds = 3\ntrials = 0\n'
        '[space]\nlr = "2^-9..2^-5"\nx = [1, 2, 3]\n[set]\nsteps = 10\n'
    )
    pl.DataFrame({"text": [f"hello world {i}" for i in range(50)], "n": range(50)}).write_parquet(shared / "a.parquet")
    pixels = [",".join(str((i * j) % 17) for j in range(16)) + f",{i % 10}" for i in range(40)]
    (shared / "images.csv").write_text("\n".join(pixels) + "\n")


RARE = 0.12  # how often a case departs from the ordinary, in each of several ways


def anything(dice: Random) -> str:
    """A value for a flag, of any kind. A shell cannot pass a zero byte."""
    kind = dice.randrange(6)
    if kind < 4:
        text = dice.choice((NUMBERS, WORDS, NAMES, PLACES)[kind])
    elif kind == 4:
        text = str(dice.choice([dice.randint(-(10**20), 10**20), dice.uniform(-1e9, 1e9), dice.random()]))
    else:
        text = "".join(chr(dice.choice([dice.randrange(1, 128), dice.randrange(1, 0xD800)])) for _ in range(8))
    return text.replace("\x00", "0")


# Flags whose ordinary values would start something large: only values that must be refused, or that are small.
SMALL = ["1", "2", "0", "-1", "nan", "x", "", "[/]", "1e300", "9" * 400]
CALM: dict[str, list[str]] = {
    **dict.fromkeys(("seeds", "steps", "batch", "time", "sequence", "tokens", "ranks", "width", "depth"), SMALL),
    **dict.fromkeys(("widths", "depths", "head_size", "vocabulary", "micro_batch", "replicas", "tpp"), SMALL),
    **dict.fromkeys(("params", "flops", "gpu_hours"), SMALL),
    "workers": ["0", "-1", "1", "x", "nan", "1.5", ""],
    "track": ["x", "", "[/]"],
    "data": [place for place in PLACES if place != ".."],
    "engine": ["local", "x"],
    "address": ["", "x:1", "[/]"],
}
LEFT_OUT = {"compile", "full", "dry_run"}  # seconds of compilation, half an hour of training; added by hand


def flags(dice: Random, command: Callable[..., int]) -> list[str]:
    """Some flags of a command with hostile values; flags that are added later are found by themselves."""
    parameters = [p for p in inspect.signature(command).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    known = [p for p in parameters if p.name not in LEFT_OUT]
    words: list[str] = []
    for parameter in dice.sample(known, min(len(known), dice.randrange(4))):
        words.append("--" + parameter.name.strip("_").replace("_", "-"))
        if parameter.annotation is not bool:
            several = 2 if "tuple" in str(parameter.annotation) else 1
            odd = dice.random() < RARE and parameter.name not in CALM
            words += [anything(dice) if odd else fitting(dice, parameter) for _ in range(several)]
    return words


def fitting(dice: Random, parameter: inspect.Parameter) -> str:
    """A value that the parser lets through."""
    kind = str(parameter.annotation)
    options = re.findall(r"'([^']*)'", kind) if "Literal" in kind else []
    if parameter.name in CALM or options:
        return dice.choice(CALM.get(parameter.name) or options)
    if "Path" in kind:
        return dice.choice(PLACES)
    if "int" in kind:
        return dice.choice(["0", "-1", "1", "2", "64", "2147483648", "9" * 50])
    if "float" in kind:
        return dice.choice(["0", "-1", "1", "0.5", "nan", "inf", "-inf", "1e300", "1e-300", "5e-324"])
    return anything(dice)


ALWAYS = {  # so that whatever gets through is small
    "demo": ["--depths", "2"],
    "study": ["--dry-run"],
    "tune": ["--dry-run"],
    "worker": ["--idle", "0"],
    "train": TINY,
    "check": ["model.py:linear", "--widths", "4", "8", "--seeds", "1", "--workers", "1", "--base", "4", "1"],
    "check laziness": ["--depths", "2", "4", "--width", "4", "--seeds", "2", "--workers", "1"],
    "explain": ["model.py:model", "--base-shape", "32", "2"],
    "audit": ["model.py:pair", "--base-shape", "32", "2"],
    "plan": ["--width", "64", "--depth", "2"],
    "prepare": ["text.txt", "--workers", "1"],
    "export": ["finished"],
    "report": ["lr-transfer"],
    "evaluate": ["nowhere"],
    "check transfer": ["runs.csv"],
}
TUNE = ["python model.py {lr} {seed} {width} {depth} {folder}", "--loss", "output:loss ([0-9.]+)"]
TUNE += ["--space", "lr=2^-9..2^-5"]
TERMS = ["width", "depth", "lr", "seed", "m_N", "zzz", "0", "1", "16", "9" * 20, "9" * 500, "(", ")", "{", "}", "\0"]


def expression(dice: Random) -> str:
    """A placeholder of a command: arithmetic of all lengths, mostly whole."""
    terms = [dice.choice(TERMS[:9] if dice.random() > RARE else TERMS) for _ in range(dice.choice([1, 2, 3, 40, 2000]))]
    text = terms[0] + "".join(dice.choice(["+", "-", "*", "//", "%", "**", ""]) + term for term in terms[1:])
    return f"{{{text}}}".replace("\0", "0")


LIGHT = [name for name in COMMANDS if name not in ("train", "check", "check laziness", "explain", "audit", "export")]


def command_line(dice: Random) -> list[str]:
    name = dice.choice(sorted(COMMANDS) if dice.random() < RARE else LIGHT)
    always = ALWAYS.get(name, []) if dice.random() > RARE or name in ("demo", "study", "train") else []
    if name == "study" and dice.random() < 0.7:
        always = [*always, dice.choice(["lr-transfer", "shape", "laziness"])]
    if not always and name not in ("study status", "prepare"):
        always = [anything(dice) for _ in range(dice.randrange(3))]
        if name in ("check", "check laziness"):
            always = [*always, "--depths", "0"]
    if name == "tune" and dice.random() < 0.7:
        always = [*always, f"{TUNE[0]} {expression(dice)}", *TUNE[1:]]
    words = [*name.split(), *always, *flags(dice, COMMANDS[name])]
    if name in ("study", "demo", "tune", "worker"):  # the last one counts
        words += ALWAYS[name]
    if name == "prepare" and "--out" not in words:
        words += ["--out", dice.choice(PLACES)]
    return words


TEXTS = [text.encode(errors="replace").decode() for text in NAMES]
ODD = [None, True, False, -1, 0, -(10**400), 10**400, 0.5, float("nan"), float("inf"), "", "[/]", "x", [], {}]


def odd_json(dice: Random, depth: int = 2) -> object:
    kind = dice.randrange(8) if depth else 7
    if kind == 0:
        return [odd_json(dice, depth - 1) for _ in range(dice.randrange(3))]
    if kind == 1:
        return {
            dice.choice(["a", "model", "steps", *TEXTS]): odd_json(dice, depth - 1) for _ in range(dice.randrange(3))
        }
    return dice.choice(dice.choice([ODD, TEXTS]))


def paths_of(value: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [path]
    return [path, *(p for k, v in value.items() for p in paths_of(v, (*path, k)))]


def run_file(dice: Random) -> bytes:
    """run.json with a field replaced, removed or added, or with damaged bytes."""
    return changed_json(dice, to_json(RUN))


def changed_json(dice: Random, text: str) -> bytes:
    """JSON with a field replaced, removed or added, or with damaged bytes. What was sealed is mostly sealed again."""
    kind = dice.choice(["field"] * 6 + ["bytes"] * 3 + ["whole", "deep"])
    if kind == "deep":
        return (dice.choice(["[", '{"a":', '{"model":{"width":']) * dice.choice([10, 1000, 100_000])).encode()
    if kind == "whole":
        return json.dumps(odd_json(dice)).encode()
    if kind == "bytes":
        return damaged(dice, text.encode())
    content = json.loads(text)
    path = dice.choice([p for p in paths_of(content) if p])
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    change = dice.choice(["replace", "replace", "remove", "add"])
    if change == "remove":
        del inner[path[-1]]
    else:
        inner[path[-1] if change == "replace" else dice.choice(TEXTS)] = odd_json(dice)
    if "digest" in content and isinstance(content, dict) and dice.random() > RARE:
        content = json.loads(sealed({k: v for k, v in content.items() if k not in ("sealed", "digest")}))
    return json.dumps(content).encode()


def damaged(dice: Random, content: bytes) -> bytes:
    """Bits flipped, cut off, or something put in."""
    place = dice.randrange(max(1, len(content)))
    kind = dice.choice(["flip", "flip", "flip", "cut", "insert", "empty", "double"])
    if kind == "flip":
        bit = 1 << dice.randrange(8)
        return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :] if content else b"\x01"
    if kind == "insert":
        return content[:place] + dice.randbytes(dice.randrange(1, 9)) + content[place:]
    return {"cut": content[:place], "empty": b"", "double": content + content}[kind]


COLUMNS = ["rules", "width", "depth", "lr", "seed", "loss"]
CELLS = [*NUMBERS, *NAMES, "", "diverged", "1e-320", "1e308", "1e-308", "2.0", "64"]
NAMED = ["hyperparameter", "loss", "width", "depth", "seed", "rules", "lr", "std"]


def sweep(dice: Random) -> tuple[bytes, list[str]]:
    """A CSV, mostly like a real sweep with some cells, columns or bytes changed; and flags."""

    def rarely() -> bool:
        return dice.random() < RARE

    swept = dice.choice(dice.choice([["lr", "eps"], NAMES]))
    columns = [swept if c == "lr" else c for c in COLUMNS]
    rules = dice.sample(["completep", "mup", *NAMES], dice.randrange(1, 3))
    values, slope = range(-8, -4 if rarely() else -3), dice.choice([0.0, 0.0, 0.5])
    table = [
        [r, "64", str(d), str(2.0**e), str(s), str(round(2 + 0.02 * (e + 6 + slope * d) ** 2 + s / 1000, 6))]
        for r, d, e, s in product(rules, (2, 8), values, (0, 1))
    ]
    if dice.random() < RARE / 4:  # many distinct values in one column
        column, count = dice.randrange(5), dice.choice([12, 60, 1500, 6000])
        table = [[*line[:column], str(i + 1), *line[column + 1 :]] for i in range(count) for line in table[:3]]
    for _ in range(dice.choice([0, 0, 1, 3])):
        dice.choice(table)[dice.randrange(6)] = dice.choice(CELLS)
    if rarely():  # a whole column
        column, value = dice.randrange(6), dice.choice(CELLS)
        for line in table:
            line[column] = value
    if rarely():
        columns[dice.randrange(6)] = dice.choice([*NAMES, *COLUMNS])
    if rarely():
        table = [line[: dice.randrange(7)] for line in table]
    quoted = not rarely()
    lines = [",".join('"' + c.replace('"', '""') + '"' if quoted else c for c in line) for line in [columns, *table]]
    content = "\n".join(lines).encode(errors="surrogatepass" if rarely() else "replace")
    content = damaged(dice, content) if rarely() else content
    words = [] if rarely() else ["--hyperparameter", swept.strip().lower()]
    for name in dice.sample(NAMED, 2) if rarely() else []:
        words += [f"--{name}", dice.choice([*COLUMNS, swept, *NAMES])]
    words += ["--base", dice.choice(NUMBERS), dice.choice(NUMBERS)] if rarely() else []
    return content, [w.replace("\x00", "0") for w in words]


@dataclass(frozen=True)
class Damage:
    """What was done to one file of a folder."""

    file: str
    kind: str
    content: bytes = b""

    def do(self, folder: Path) -> None:
        path = folder / self.file
        path.unlink(missing_ok=True)
        if self.kind in ("folder", "pipe", "device"):
            plant(path, self.kind)
        elif self.kind in ("loop", "dangling"):
            path.symlink_to(path.name if self.kind == "loop" else "gone")
        elif self.kind == "bytes":
            path.write_bytes(self.content)


def damages(dice: Random, folder: Path) -> list[Damage]:
    """To one or two files of a folder: bytes changed, removed, or something else in their place."""
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    done = []
    for file in dice.sample(files, dice.randrange(1, 3)):
        kind = dice.choice(["bytes"] * 4 + ["json", "json", "missing", "folder", "loop", "dangling", "pipe", "device"])
        content = b""
        if kind == "json" and file.endswith(".json"):
            content = json.dumps(odd_json(dice)).encode()
        elif kind in ("bytes", "json"):
            content = damaged(dice, (folder / file).read_bytes())
        done.append(Damage(file, "bytes" if kind == "json" else kind, content))
    return done


def damaged_copy(folder: Path, target: Path, damage: list[Damage]) -> Path:
    shutil.copytree(folder, target, symlinks=True)
    for one in damage:
        one.do(target)
    return target


# The files of `prepare_shared` and the commands that read them, each as often as it stands here.
LAZY = ["check", "laziness", "--images", "images.csv", "--depths", "2", "4", "--width", "4", "--seeds", "2"]
READERS: list[tuple[str, list[str]]] = [
    *[("runs/store", words) for words in (["study", "status"], ["report", *REPORT], ["study", *REPORT, "--dry-run"])],
    *[("runs/store", words) for words in (["study", "status"], ["report", *REPORT], ["tune", "status"])],
    ("runs/tunings/a.json", ["tune", "status"]),
    ("pack.gz", ["study", "unpack", "pack.gz"]),
    *[("trained/store", ["study", "pack", "new.gz", "--out", "trained"])] * 2,
    *[("queue/store/.queue", ["worker", "queue/store", "--idle", "0"])] * 2,
    ("tuned.json", ["plan", "--width", "64", "--depth", "8", "--from", "tuned.json"]),
    ("tuned.json", ["plan", "--width", "64", "--depth", "8", "--from", "tuned.json"]),
    ("rules.json", ["explain", "model.py:model", "--base-shape", "32", "2", "--rules", "rules.json"]),
    ("tune.toml", ["tune", "tune.toml", "--dry-run"]),
    ("tune.toml", ["tune", "tune.toml", "--dry-run"]),
    ("a.parquet", ["prepare", "a.parquet", "--workers", "1"]),
    ("images.csv", [*LAZY, "--workers", "1"]),
]
PLANTED = ("folder", "loop", "dangling", "pipe", "device", "missing")


def shared_file(dice: Random, shared: Path) -> tuple[Damage, list[str]]:
    """One of these files damaged or forged, and a command that reads it."""
    name, words = dice.choice(READERS)
    path = shared / name
    if name != "runs/store" and path.is_dir():  # a run to pack, or a queue
        name = dice.choice([str(p.relative_to(shared)) for p in sorted(path.rglob("*")) if p.is_file()])
        path = shared / name
    if path.is_dir():
        results = [str(p.relative_to(shared)) for p in sorted(path.glob("*/result.json"))]
        name = dice.choice([f"{name}/.index", f"{name}/store.json", *dice.sample(results, 3)])
        path = shared / name
    if path.suffix != ".parquet" and dice.random() < RARE:  # prepare's own tests have these
        return Damage(name, dice.choice(PLANTED)), words
    return Damage(name, "bytes", forged(dice, path)), words


def forged(dice: Random, path: Path) -> bytes:
    """Other content under the right digests, as somebody who makes a file up would write it; or plain damage."""
    content = path.read_bytes()
    if path.name == ".index":
        body = changed_json(dice, content.partition(b"\n")[2].decode())
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    if path.name == "pack.gz" and dice.random() > RARE:
        first, line = gzip.decompress(content).decode().splitlines()
        entry = json.loads(line)
        file = dice.choice([*entry["files"], "evaluations/x.json"])
        text = entry["files"].get(file, '{"name": "x", "tasks": {}}')
        text = text.partition("\n")[0] if file == "metrics.jsonl" else text
        entry["files"][file] = changed_json(dice, text).decode(errors="replace")
        return gzip.compress(f"{first}\n{json.dumps(entry)}\n".encode())
    if path.name == "rules.json" and dice.random() > RARE:
        body = json.loads(content)
        del body["sha256"]
        part = dice.choice([body, body["rows"][0], body["rows"][0]["exponents"]["lr"]])
        part[dice.choice([*part, "zzz"])] = odd_json(dice)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return json.dumps(body | {"sha256": digest}).encode()
    if path.suffix == ".json":
        return changed_json(dice, content.decode())
    if path.suffix in (".toml", ".csv") and dice.random() > RARE:
        text = content.decode()
        old = dice.choice(re.findall(r"[0-9.^-]+|[a-z]+", text))
        return text.replace(old, dice.choice([*NUMBERS, *NAMES]), 1).encode(errors="replace")
    return damaged(dice, content)
