"""A check's findings as a table for people and as data for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from completep.measure.verdict import Finding, culprits, overall

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def by_rules(findings: list[Finding]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for f in findings:
        found.setdefault(f.rules, []).append(f)
    return found


def to_table(findings: list[Finding]) -> Table:
    """One line a quantity: slope, interval, what is allowed, verdict."""
    table = Table(title="slopes: quantity ∝ size^slope, with 95 % intervals", title_justify="left")
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


def to_lines(findings: list[Finding]) -> list[str]:
    """The verdict on each parameterization, with what is to blame."""
    lines = []
    for rules, its in by_rules(findings).items():
        word = overall(its)
        why = ", ".join(culprits(its)[:4]) if word == "FAIL" else "; ".join(dict.fromkeys(f.why for f in its if f.why))
        lines.append(f"{rules}: [{COLOURS[word]}]{word}[/]" + (f" ({why})" if why else ""))
    return lines


def to_json(findings: list[Finding]) -> dict[str, Any]:
    return {
        "verdicts": {rules: overall(its) for rules, its in by_rules(findings).items()},
        "culprits": {rules: culprits(its) for rules, its in by_rules(findings).items()},
        "findings": [asdict(f) for f in findings],
    }
