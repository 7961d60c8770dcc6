"""Table 1 of "Don't be lazy: CompleteP enables compute-efficient deep transformers", as data.

This is the only file that knows exponents of

    m_N = N / N_base      how much wider the model is than the one that was tuned
    m_L = L / L_base      how much deeper

Everything is relative to the base model: at m_N = m_L = 1 every factor below is exactly 1.
Rows that are not in the paper stand in the same table and say where they come from.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from completep.errors import UserError

TABLE_1 = "CompleteP, Table 1"
WEIGHT_DECAY = "CompleteP, App. D.4: λ·η, the shrinkage per step, stays width-free"


class Role(StrEnum):
    """What a parameter is, as far as the rules care. Every parameter has exactly one."""

    EMBEDDING = "embedding"  # token and position tables, input projections
    EMBEDDING_BIAS = "embedding bias"  # bias of an input projection
    HIDDEN = "hidden weight"  # every matrix inside a residual branch
    HIDDEN_BIAS = "hidden bias"  # every linear bias inside a branch
    BLOCK_NORM = "block norm"  # gain and bias of the norms inside a block
    QK_NORM = "QK norm"  # per-head gains, shared over heads
    FINAL_NORM = "final norm"  # after the last block; also a norm right after the embedding
    UNEMBEDDING = "unembedding"  # the readout matrix
    UNEMBEDDING_BIAS = "unembedding bias"


RANDOM = frozenset({Role.EMBEDDING, Role.HIDDEN, Role.UNEMBEDDING})  # start as N(0, std²); the others at a constant
DECAYED = RANDOM  # weight decay acts on matrices only


@dataclass(frozen=True)
class Power:
    """The factor m_N^width · m_out^out · m_L^depth.

    m_N is a matrix's own ratio of fan-in to the base's, m_out that of its fan-out. In a plain transformer both are N / N_base;
    they differ where some dimension does not grow with the width (grouped keys, a feed-forward width of its own).
    """

    width: float = 0.0
    depth: float = 0.0
    out: float = 0.0

    def __call__(self, m_N: float, m_L: float = 1.0, m_out: float | None = None) -> float:
        m_out = m_N if m_out is None else m_out
        return float(float(m_N) ** self.width * float(m_out) ** self.out * float(m_L) ** self.depth)

    def keep(self, *, width: bool, depth: bool) -> "Power":
        """This power with its width or depth factors dropped."""
        return Power(self.width * width, self.depth * depth, self.out * width)


ONE = Power()


@dataclass(frozen=True)
class Rule:
    """How one role's settings grow with the model; each is a factor on the tuned base value."""

    init_std: Power = ONE
    lr: Power = ONE
    weight_decay: Power = ONE
    eps: Power = ONE
    source: str = TABLE_1

    def keep(self, *, width: bool, depth: bool) -> "Rule":
        kept = {
            name: getattr(self, name).keep(width=width, depth=depth)
            for name in ("init_std", "lr", "weight_decay", "eps")
        }
        return replace(self, **kept)


class Column(StrEnum):
    """The optimizers the table knows, by how their step depends on the size of the gradient."""

    ADAM = "Adam family"
    SGD = "SGD"
    MUON = "Muon"


@dataclass(frozen=True)
class Rules:
    """A parameterization: one rule per optimizer column and role, and the multipliers of the forward pass."""

    name: str
    columns: Mapping[Column, Mapping[Role, Rule]]
    branch: Power  # on the output of every residual branch
    logits: Power  # on the readout's product with the final stream; its bias stays outside
    attention: Power  # the scale wanted on q·k, relative to the base's, in d_head / d_head_base
    embedding: Power  # on an embedding that the model itself multiplies by sqrt(N), as Gemma does

    def rule(self, role: Role, column: Column = Column.ADAM) -> Rule:
        rows = self.columns.get(column, {})
        if role not in rows:
            raise UserError(
                f"{self.name} has no {column} rule for the role '{role}'",
                fix=f"give those parameters to AdamW: param_groups(..., optimizer='adamw', roles=[...]); {column} takes: "
                + (", ".join(rows) or "nothing"),
            )
        return rows[role]

    def effect(self, *, wider: bool, deeper: bool) -> Hashable:
        """What is left of the rules at a shape that is wider or deeper than the base, or neither: where two parameterizations
        have the same effect, they are one and the same run."""
        powers = (self.branch, self.logits, self.attention, self.embedding)
        rows = tuple(
            (column, role, replace(rule.keep(width=wider, depth=deeper), source=""))
            for column, rules in sorted(self.columns.items())
            for role, rule in sorted(rules.items())
            if column is Column.ADAM
        )
        return rows, tuple(power.keep(width=wider, depth=deeper) for power in powers)

    def __repr__(self) -> str:
        return f"<rules {self.name}>"


def _adam(a: float) -> dict[Role, Rule]:
    depth_lr = Power(depth=a - 1)  # Desideratum 2: each branch moves the stream by Θ(1/L)
    outer_eps = Power(width=-1)  # ε follows the gradient's own size (App. D.5)
    block_eps = Power(out=-1, depth=-a)  # a gradient is shared out over the outputs it flows back from
    return {
        Role.EMBEDDING: Rule(eps=outer_eps),
        Role.EMBEDDING_BIAS: Rule(eps=outer_eps, source="derived: an embedding row that every input shares"),
        Role.HIDDEN: Rule(
            init_std=Power(width=-1 / 2),
            lr=Power(width=-1, depth=a - 1),
            weight_decay=Power(width=1),
            eps=block_eps,
            source=f"{TABLE_1}; {WEIGHT_DECAY}",
        ),
        Role.HIDDEN_BIAS: Rule(lr=depth_lr, eps=block_eps),
        Role.BLOCK_NORM: Rule(lr=depth_lr, eps=block_eps),
        Role.QK_NORM: Rule(
            lr=depth_lr, eps=Power(depth=-a), source="Complete(d)P, arXiv 2512.22382: the gradient sums over heads"
        ),
        Role.FINAL_NORM: Rule(eps=outer_eps, source=f"{TABLE_1}; ε derived: the gradient passes the logit multiplier"),
        Role.UNEMBEDDING: Rule(eps=outer_eps),
        Role.UNEMBEDDING_BIAS: Rule(source="derived: the bias stands outside the logit multiplier, so nothing scales"),
    }


def _sgd(a: float) -> dict[Role, Rule]:
    """SGD's step is the gradient, so the learning rate undoes the gradient's own m_N^-1 · m_L^-a.

    Weight decay is chosen so that lr · λ, the shrinkage per step, is AdamW's.
    """
    source = "derived from the gradient sizes of App. D.5; cf. Bordelon et al. 2024, Table 1"
    outer = Rule(lr=Power(width=1), weight_decay=Power(width=-1), source=source)
    vector = Rule(lr=Power(out=1, depth=2 * a - 1), source=source)
    return {
        Role.EMBEDDING: outer,
        Role.EMBEDDING_BIAS: outer,
        Role.HIDDEN: Rule(
            init_std=Power(width=-1 / 2),
            lr=Power(width=-1, out=1, depth=2 * a - 1),
            weight_decay=Power(width=1, out=-1, depth=-a),
            source=source,
        ),
        Role.HIDDEN_BIAS: vector,
        Role.BLOCK_NORM: vector,
        Role.QK_NORM: Rule(lr=Power(depth=2 * a - 1), source=source),
        Role.FINAL_NORM: outer,
        Role.UNEMBEDDING: outer,
        Role.UNEMBEDDING_BIAS: Rule(source=source),
    }


def _muon(a: float) -> dict[Role, Rule]:
    """An orthogonalised step × sqrt(fan_out / fan_in) has the right size at any width; only depth is left."""
    return {
        Role.HIDDEN: Rule(
            init_std=Power(width=-1 / 2), lr=Power(depth=a - 1), source="derived: spectral step × sqrt(fan_out/fan_in)"
        )
    }


def alpha(a: float) -> Rules:
    """The paper's family: residual branches × m_L^-a, and all that must follow, for a in [0.5, 1]."""
    if isinstance(a, bool) or not isinstance(a, (int, float)) or not 0.5 <= a <= 1:
        raise UserError(
            f"alpha({a!r}): alpha must lie in [0.5, 1]",
            fix="use 1 (CompleteP) or a value from 0.5 up; below 0.5 the stream explodes with depth, above 1 blocks stop learning",
        )
    return Rules(
        name="CompleteP" if a == 1 else f"alpha={a:g}",
        columns={Column.ADAM: _adam(a), Column.SGD: _sgd(a), Column.MUON: _muon(a)},
        branch=Power(depth=-a),
        logits=Power(width=-1),
        attention=Power(width=-1),
        embedding=Power(width=-1 / 2),
    )


def _drop(rules: Rules, name: str, *, width: bool, depth: bool) -> Rules:
    """The same table with its width or depth factors gone."""

    def kept(power: Power) -> Power:
        return power.keep(width=width, depth=depth)

    columns = {
        c: {role: rule.keep(width=width, depth=depth) for role, rule in rows.items()}
        for c, rows in rules.columns.items()
    }
    return Rules(name, columns, kept(rules.branch), kept(rules.logits), kept(rules.attention), kept(rules.embedding))


def flat_eps(a: float) -> Rules:
    """alpha without its depth rule for ε: what the paper's ablation of that rule compares with."""
    rules = alpha(a)
    adam = {
        role: replace(rule, eps=rule.eps.keep(width=True, depth=False))
        for role, rule in rules.columns[Column.ADAM].items()
    }
    return replace(rules, name=f"flat-eps={a:g}", columns={Column.ADAM: adam})


def literature(a: float) -> Rules:
    """alpha as described before the paper: biases, norms and ε know nothing of depth. Unstable; a negative control."""
    rules = flat_eps(a)
    adam = dict(rules.columns[Column.ADAM])
    for role in (Role.HIDDEN_BIAS, Role.BLOCK_NORM, Role.QK_NORM):
        adam[role] = replace(adam[role], lr=ONE, source="Bordelon et al. 2023, Yang et al. 2023: not considered")
    return replace(rules, name=f"literature alpha={a:g}", columns={Column.ADAM: adam})


COMPLETEP = alpha(1)
MUP = _drop(COMPLETEP, "muP", width=True, depth=False)
SP = _drop(COMPLETEP, "SP", width=False, depth=False)


def rules_named(name: str) -> Rules:
    """`sp`, `mup`, `completep`, `alpha=0.75`, `literature=0.5`, `flat-eps=1`: the rules as a word on the command line."""
    word, _, value = name.strip().lower().partition("=")
    fixed = {"sp": SP, "mup": MUP, "completep": COMPLETEP}
    families = {"alpha": alpha, "literature": literature, "literature alpha": literature, "flat-eps": flat_eps}
    if word in fixed and not value:
        return fixed[word]
    if word in families and value:
        try:
            return families[word](float(value))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
    raise UserError(
        f"no rules named {name!r}", fix="use sp, mup, completep, alpha=0.5 … alpha=1, literature=0.5 or flat-eps=1"
    )


@dataclass(frozen=True)
class OptimizerKind:
    """What must be known of an optimizer to place it in the table and to fold it."""

    column: Column
    eps: float | None = None  # its default ε; None where it has none
    decoupled: bool = True  # weight decay acts on the weight, not through the gradient
    state: Mapping[str, int] | None = None  # its state tensors, and the power of the gradient each one holds


# Adagrad, Lion and SignSGD take Adam's learning rates (App. D.1: "well-normalized Adam-like algorithms").
OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(Column.ADAM, eps=1e-8, state={"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}),
    "adam": OptimizerKind(
        Column.ADAM, eps=1e-8, decoupled=False, state={"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
    ),
    "adagrad": OptimizerKind(Column.ADAM, eps=1e-10, decoupled=False, state={"sum": 2}),
    "lion": OptimizerKind(Column.ADAM, state={"exp_avg": 1}),
    "signsgd": OptimizerKind(Column.ADAM, state={"momentum_buffer": 1}),
    "sgd": OptimizerKind(Column.SGD, state={"momentum_buffer": 1}),
    "muon": OptimizerKind(Column.MUON, state={"momentum_buffer": 1}),
}


def optimizer_kind(optimizer: "str | type | object") -> OptimizerKind:
    """The table's entry for an optimizer given by name, class or instance. An unknown one is refused, never guessed."""
    if not isinstance(optimizer, (str, type)):
        optimizer = type(optimizer)
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    kind = OPTIMIZERS.get(name.lower().replace("_", "").replace("-", ""))
    if kind is None:
        raise UserError(
            f"the table has no rule for the optimizer {name!r}",
            fix="use one of " + ", ".join(OPTIMIZERS) + "; if yours steps exactly like one of them, pass that name",
        )
    return kind


def muon_shape_factor(fan_out: int, fan_in: int, rows: int, columns: int) -> float:
    """What is still missing to sqrt(fan_out / fan_in) after torch.optim.Muon's own sqrt(max(1, rows / columns))."""
    return float((fan_out / fan_in / max(1.0, rows / columns)) ** 0.5)


@dataclass(frozen=True)
class Folded:
    """How settings change when y = c·W x becomes y = W'x with W' = cW: the same training run, no multiplier."""

    lr: float
    weight_decay: float
    eps: float

    @staticmethod
    def by(c: float, column: Column) -> "Folded":
        if column is Column.SGD:  # its step is the gradient, which shrinks by c as the weight grows by c
            return Folded(lr=c * c, weight_decay=1 / (c * c), eps=1.0)
        return Folded(lr=c, weight_decay=1 / c, eps=1 / c)


@dataclass(frozen=True)
class Horizon:
    """Transfer over batch and duration, m_S = steps / base steps (Complete(d)P, arXiv 2512.22382). Opt-in.

    Published exponents range from 0.28 to 0.5; it is a setting.
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1:
            raise UserError(
                f"horizon exponent {self.exponent!r}: must lie in [0, 1]", fix="published values are 0.28 to 0.5"
            )

    def lr(self, m_S: float) -> float:
        return float(m_S**-self.exponent)

    def weight_decay(self, m_S: float) -> float:
        return float(m_S**-self.exponent)

    def eps(self, m_S: float) -> float:
        return float(m_S**self.exponent)

    @staticmethod
    def beta(beta: float, m_S: float) -> float:
        """1 - β falls as 1 / m_S, so that its memory spans the same share of the run."""
        return max(0.0, 1 - (1 - beta) / m_S)
