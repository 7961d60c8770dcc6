"""A check's findings as a table for people and as data for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from completep.measure.laziness import LazyVerdict
from completep.measure.optimum import Interval
from completep.measure.transfer import Transfer
from completep.measure.verdict import Finding, culprits, overall

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def by_rules(findings: list[Finding]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for f in findings:
        found.setdefault(f.rules, []).append(f)
    return found


def to_table(findings: list[Finding]) -> Table:
    """One line a quantity: slope, interval, what is allowed, verdict."""
    table = Table(title="slopes: quantity ∝ size^slope, with 90 % intervals", title_justify="left")
    for heading, justify in (
        ("rules", "left"), ("grown in", "left"), ("D", "right"), ("quantity", "left"), ("slope", "right"), ("interval", "right"),
        ("allowed", "right"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for rules, lines in by_rules(findings).items():
        for f in lines:
            slope = f"{f.slope.value:+.2f}" if f.slope else "—"
            interval = f"{f.slope.low:+.2f} … {f.slope.high:+.2f}" if f.slope else ""
            allowed = f"{'' if f.least is None else f'{f.least:+.1f}'} … {f.most:+.1f}"
            word = f"[{COLOURS[f.word]}]{f.word}[/]" + (f" {f.why}" if f.why else "")
            table.add_row(rules, f.axis, str(f.desideratum), f.quantity, slope, interval, allowed, word)
        table.add_section()
    return table


def by_desideratum(findings: list[Finding]) -> dict[int, str]:
    return {d: overall([f for f in findings if f.desideratum == d]) for d in sorted({f.desideratum for f in findings})}


def to_lines(findings: list[Finding]) -> list[str]:
    """The verdict on each parameterization, with what is to blame."""
    lines = []
    for rules, its in by_rules(findings).items():
        word = overall(its)
        why = ", ".join(culprits(its)[:4]) if word == "FAIL" else "; ".join(dict.fromkeys(f.why for f in its if f.why))
        each = ", ".join(f"desideratum {d} {said}" for d, said in by_desideratum(its).items())
        lines.append(f"{rules}: [{COLOURS[word]}]{word}[/] ({each})" + (f": {why}" if why else ""))
    return lines


def to_json(findings: list[Finding]) -> dict[str, Any]:
    return {
        "verdicts": {rules: overall(its) for rules, its in by_rules(findings).items()},
        "desiderata": {rules: by_desideratum(its) for rules, its in by_rules(findings).items()},
        "culprits": {rules: culprits(its) for rules, its in by_rules(findings).items()},
        "findings": [asdict(f) for f in findings],
    }


def laziness_table(verdicts: list[LazyVerdict]) -> Table:
    table = Table(title="|Δh - Δh_lin| / |Δh_lin| ∝ L^slope", title_justify="left")
    for heading in ("rules", "slope", "interval", "verdict"):
        table.add_column(heading)
    for v in verdicts:
        slope = f"{v.slope.value:+.3f}" if v.slope else "—"
        interval = f"{v.slope.low:+.3f} … {v.slope.high:+.3f}" if v.slope else ""
        table.add_row(v.rules, slope, interval, f"[{COLOURS[v.word]}]{v.word}[/]" + (f" {v.why}" if v.why else ""))
    return table


def transfer_table(found: list[Transfer]) -> Table:
    name = found[0].hyperparameter
    table = Table(title=f"Using the base's best {name} at every shape", title_justify="left")
    for heading in ("rules", "shape", f"best {name}", "drift, octaves", "regret, %", "loss there", "verdict"):
        table.add_column(heading, justify="left" if heading in ("rules", "shape", "verdict") else "right")
    for t in found:
        table.add_row(t.rules, f"{t.base.width} × {t.base.depth} (base)", f"{t.best:.4g}", "", "", "", "")
        for s in t.shapes:
            drift, regret = (
                _with(value, i) for value, i in ((s.drift, s.drift_interval), (s.regret, s.regret_interval))
            )
            word = f"[{COLOURS[s.word]}]{s.word}[/]" + (f" {s.why}" if s.why else "")
            table.add_row(
                "", f"{s.shape.width} × {s.shape.depth}", f"{s.optimum:.4g}", drift, regret, f"{s.loss:.4f}", word
            )
        table.add_section()
    return table


def _with(value: float, interval: Interval | None) -> str:
    return f"{value:+.2f}" + (f" ({interval.low:+.2f} … {interval.high:+.2f})" if interval else "")


def transfer_lines(found: list[Transfer]) -> list[str]:
    deeper = {
        True: "; deeper is better at the transferred value",
        False: "; deeper is not better at the transferred value",
        None: "",
    }
    return [
        f"{t.rules}: [{COLOURS[t.word]}]{t.word}[/]" + (f" ({t.why})" if t.why else "") + deeper[t.deeper_is_better]
        for t in found
    ]
