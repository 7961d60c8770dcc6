"""The resolved table as a result: what the rules do to each parameter of a model, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from completep.config import Shape
from completep.report.document import Cell, Document, Json, Part, Table, Text
from completep.report.result import Result
from completep.rules.multipliers import Style


def summary(name: str, style: Style, base: Shape, target: Shape, multipliers: Mapping[str, float]) -> str:
    """The rules, the sizes and the multipliers in one line."""
    width = f"width {base.width} → {target.width} ({_ratio('m_N', target.width / base.width)})"
    depth = f"depth {base.depth} → {target.depth} ({_ratio('m_L', target.depth / base.depth)})"
    factors = ", ".join(f"{kind} × {factor:.4g}" for kind, factor in multipliers.items())
    place = "in the forward pass" if style == "multiplier" else "folded into the weights"
    return f"{name}, {width}, {depth}; {factors} ({place})"


def _ratio(name: str, value: float) -> str:
    return f"{name} = {value:g}" + (", smaller than the base" if value < 1 else "")


@dataclass(frozen=True)
class Row:
    """One parameter."""

    name: str
    role: str
    shape: tuple[int, ...]
    m_N: float
    m_L: float
    init: str  # "N(0, 0.01²)" or the constant that it starts at
    lr: float
    weight_decay: float
    eps: float
    multiplier: float  # of the forward pass, on what this parameter makes; 1 in the folded style
    source: str
    template: str
    trained: bool


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """The rules, the sizes and one row per parameter. Iterating over it gives the rows."""

    slug = "explain"
    model: str  # name of the class
    rules: str  # key
    name: str  # of the rules
    style: Style
    base: Shape
    target: Shape
    m_N: float
    m_L: float
    multipliers: Mapping[str, float]
    rows: tuple[Row, ...]
    unchecked: tuple[str, ...] = ()  # what could not be checked on this model

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def collapsed(self) -> list[tuple[Row, int]]:
        """One row per template, with the number of blocks that have it."""
        counts: dict[str, tuple[Row, int]] = {}
        for row in self.rows:
            first, count = counts.get(row.template, (row, 0))
            counts[row.template] = (first, count + 1)
        return list(counts.values())

    def document(self) -> Document:
        sources = list(dict.fromkeys(row.source for row in self.rows))
        uniform = all((row.m_N, row.m_L) == (self.m_N, self.m_L) for row in self.rows)  # then the summary has them
        rows = []
        for row, count in self.collapsed():
            ratios: dict[str, Cell] = {} if uniform else {"m_N": row.m_N, "m_L": row.m_L}
            settings = (row.lr, row.weight_decay, row.eps) if row.trained else (None, None, None)
            cells: dict[str, Cell] = {
                "parameter": row.template,
                "×": count,
                "role": row.role if row.trained else f"{row.role} (frozen)",
                "shape": "×".join(map(str, row.shape)) or "scalar",
                **ratios,
                "init": row.init,
                **dict(zip(("lr", "wd", "eps"), settings, strict=True)),
                "multiplier": row.multiplier,
                "note": sources.index(row.source) + 1,
            }
            rows.append(cells)
        notes = tuple(f"{number}  {source}" for number, source in enumerate(sources, 1))
        parts: tuple[Part, ...] = (
            Text(summary(self.name, self.style, self.base, self.target, self.multipliers)),
            *(Text(f"Not checked: {line}.") for line in self.unchecked),
            Table.of("", rows, notes),
        )
        return Document(f"What the rules do to {self.model}", parts, kind="completep explain")

    def _fields(self) -> Json:
        data = asdict(self)
        rows = [{k: v for k, v in row.items() if k != "template"} for row in data.pop("rows")]
        return {**data, "parameters": rows}
