"""Table 1 of "Don't be lazy: CompleteP enables compute-efficient deep transformers", as data.

This is the only file that contains exponents of

    m_N = N / N_base      how much wider the model is than the tuned base model
    m_L = L / L_base      how much deeper it is

and the only file that lists the roles and their traits.
Everything is relative to the base model: at m_N = m_L = 1 every factor is exactly 1.
Rows that are not in the paper are in the same table, with their source.
"""

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Literal

from completep.config import GPTConfig, check_multipliers
from completep.errors import UserError

TABLE_1 = "CompleteP, Table 1"
OVER_HEADS = "Complete(d)P, arXiv 2512.22382: the gradient sums over heads"
EXPERTS = "measured (docs/derive.md): a hidden weight with one fan-out per expert; cf. Jiang et al., arXiv 2601.20205"
ROUTER = (
    "derived: a hidden weight, once its gradient has aligned (docs/rules.md); arXiv 2601.20205 prints ε m_N^-1 m_L^-1"
)
VECTORS = "derived: acts as a gain or bias inside a branch; measured on sinks, layer scales, decays (docs/rules.md)"
HEADS = "derived: a hidden layer after the stream, so nothing depends on the depth; measured (docs/rules.md)"
TABLES = "derived: a row is a bias inside a branch that depends on the token"
STREAM = "derived: L numbers multiply the stream one after the other, so each may move by 1/L"
WEIGHT_DECAY = "CompleteP, App. D.4: λ·η, the shrinkage per step, stays width-free"


class Role(StrEnum):
    """What a parameter is, as far as the rules are concerned. Every parameter has exactly one role."""

    EMBEDDING = "embedding"  # token and position tables, input projections
    EMBEDDING_BIAS = "embedding bias"  # bias of an input projection
    HIDDEN = "hidden weight"  # every matrix inside a residual branch
    EXPERT = "expert weight"  # a tensor that stacks one matrix per expert
    ROUTER = "router"  # the matrix that chooses and weighs experts
    HIDDEN_BIAS = "hidden bias"  # every linear bias inside a branch
    BLOCK_NORM = "block norm"  # gain and bias of the norms inside a block
    BLOCK_TABLE = "block table"  # a table whose rows enter inside a branch, as value embeddings do
    BLOCK_VECTOR = "block vector"  # acts entry by entry inside a block: gates, decays, layer scales, attention sinks
    QK_NORM = "QK norm"  # per-head gains, shared over heads
    STREAM_SCALE = "stream scale"  # one number per layer, which multiplies the stream or mixes the embedding into it
    FINAL_NORM = "final norm"  # after the last block; also a norm right after the embedding
    HEAD = "head weight"  # a matrix outside the blocks that reads activations, as in an MLM head
    HEAD_BIAS = "head bias"
    UNEMBEDDING = "unembedding"  # the readout matrix
    UNEMBEDDING_BIAS = "unembedding bias"

    @property
    def trait(self) -> "Trait":
        return TRAITS[self]


# Which models of the reference decoder have parameters of a role: none, all, or those with biases, with QK norms, with
# experts, or with a readout that is not the embedding.
InDecoder = Literal["never", "always", "bias", "qk_norm", "experts", "untied"]


@dataclass(frozen=True)
class Trait:
    """What holds for every parameter of a role, whatever the parameterization."""

    # Where m_N and m_out come from:
    #   model    the width ratio of the model, for both
    #   matrix   the ratios of fan-ins and of fan-outs
    #   vector   the width ratio of the model, and the ratio of lengths
    #   readout  the ratio of fan-ins, and 1
    #   fixed    the width ratio of the model, and 1 (it is as long as a head or the vocabulary)
    fan: Literal["model", "matrix", "vector", "readout", "fixed"]
    start: Literal["random", "constant"] = "constant"  # random: N(0, std²)
    decayed: bool = False  # weight decay acts on it
    matrix: bool = False
    table: bool = False  # it looks its rows up; other matrices sum over their inputs
    inside: bool = False  # inside a block
    acts_on: Literal["stream", "logits"] = "stream"  # where its update becomes visible
    layered: bool = False  # it stands outside the blocks and has an entry for each of them
    shared: bool = False  # by all heads, whose gradients cancel at init and align in training
    routed: bool = False  # it has a part per expert, which sees only the tokens that a router sends to it
    bare: bool = False  # no module holds it, so its gradient is watched where it meets an activation
    fixed_outputs: bool = False  # it does not grow with the width: a router has one output per expert
    in_decoder: InDecoder = "never"


TRAITS: Mapping[Role, Trait] = {
    Role.EMBEDDING: Trait("model", start="random", decayed=True, matrix=True, table=True, in_decoder="always"),
    Role.EMBEDDING_BIAS: Trait("model"),
    Role.HIDDEN: Trait("matrix", start="random", decayed=True, matrix=True, inside=True, in_decoder="always"),
    Role.EXPERT: Trait(
        "matrix", start="random", decayed=True, matrix=True, inside=True, routed=True, in_decoder="experts"
    ),
    Role.ROUTER: Trait(
        "matrix", start="random", decayed=True, matrix=True, inside=True, fixed_outputs=True, in_decoder="experts"
    ),
    Role.HIDDEN_BIAS: Trait("vector", inside=True, in_decoder="bias"),
    Role.BLOCK_NORM: Trait("vector", inside=True, in_decoder="always"),
    Role.BLOCK_TABLE: Trait("vector", start="random", decayed=True, matrix=True, table=True, inside=True),
    Role.BLOCK_VECTOR: Trait("vector", inside=True, bare=True),
    Role.QK_NORM: Trait("fixed", inside=True, shared=True, in_decoder="qk_norm"),
    Role.STREAM_SCALE: Trait("fixed", bare=True, layered=True),
    Role.FINAL_NORM: Trait("vector", acts_on="logits", in_decoder="always"),
    Role.HEAD: Trait("matrix", start="random", decayed=True, matrix=True, acts_on="logits"),
    Role.HEAD_BIAS: Trait("vector", acts_on="logits"),
    Role.UNEMBEDDING: Trait(
        "readout", start="random", decayed=True, matrix=True, acts_on="logits", in_decoder="untied"
    ),
    Role.UNEMBEDDING_BIAS: Trait("fixed", acts_on="logits"),
}

# What a search, tuned.json and a table's columns call the multiplier of a role's learning rate: lr_of_hidden_weight.
LR_NAMES = {str(role): "lr_of_" + role.lower().replace(" ", "_") for role in Role}


def decoder_roles(model: GPTConfig) -> tuple[Role, ...]:
    """The roles of the reference decoder's parameters."""
    there: Mapping[InDecoder, bool] = {
        "never": False, "always": True, "bias": model.bias, "qk_norm": model.qk_norm, "experts": model.experts > 0,
        "untied": not model.tied,
    }  # fmt: skip
    return tuple(role for role in Role if there[role.trait.in_decoder])


def check_lr_of(lr_of: Mapping[str, float], roles: Collection[Role]) -> None:
    """Refuse a multiplier that would have no effect, since no parameter has its role."""
    check_multipliers(lr_of)
    for name in lr_of:
        if name not in roles:
            known = ", ".join(f"'{role}'" for role in Role if role in roles)
            what = f"lr_of: no parameter here has the role {str(name)!r:.40}"
            raise UserError(what, fix=f"the roles here are {known}")


@dataclass(frozen=True)
class Power:
    """The factor m_N^width · m_out^out · m_L^depth, and powers of the ratios of further axes, by name.

    For a matrix, m_N is the ratio of its fan-in to the base's fan-in, and m_out is the same ratio for the fan-out.
    In a plain transformer both are N / N_base. They differ where a dimension does not grow with the width
    (grouped keys, a feed-forward width that is set separately).
    """

    width: float = 0.0
    depth: float = 0.0
    out: float = 0.0
    further: tuple[tuple[str, float], ...] = ()  # (axis, exponent)

    def __call__(
        self, m_N: float, m_L: float = 1.0, m_out: float | None = None, further: Mapping[str, float] | None = None
    ) -> float:
        m_out = m_N if m_out is None else m_out
        others = math.prod(float((further or {}).get(axis, 1.0)) ** exponent for axis, exponent in self.further)
        return float(float(m_N) ** self.width * float(m_out) ** self.out * float(m_L) ** self.depth * others)

    @staticmethod
    def of(exponents: Mapping[str, float]) -> "Power":
        """From exponents by axis: "width", "depth", and further ones."""
        further = tuple((axis, e) for axis, e in exponents.items() if axis not in ("width", "depth") and e)
        return Power(exponents.get("width", 0.0), exponents.get("depth", 0.0), 0.0, further)

    def __truediv__(self, other: "Power") -> "Power":
        axes = dict(self.further)
        for axis, exponent in other.further:
            axes[axis] = axes.get(axis, 0.0) - exponent
        further = tuple((axis, e) for axis, e in axes.items() if e)
        return Power(self.width - other.width, self.depth - other.depth, self.out - other.out, further)

    def keep(self, *, width: bool, depth: bool) -> "Power":
        """This power, without its width or depth factors where those are False. Further axes go with the width."""
        return Power(self.width * width, self.depth * depth, self.out * width, self.further if width else ())


ONE = Power()
RANDOM_SUM = Power(width=1 / 2)  # how a sum of independent terms grows with their number: a product at init, q·k


@dataclass(frozen=True)
class Rule:
    """How the settings of one role change with the size of the model: factors on the tuned base values."""

    init_std: Power = ONE
    lr: Power = ONE
    weight_decay: Power = ONE
    eps: Power = ONE
    source: str = TABLE_1
    by_model: bool = False  # its powers are of the ratios of the whole model, not of the tensor's own fans

    def keep(self, *, width: bool, depth: bool) -> "Rule":
        names = ("init_std", "lr", "weight_decay", "eps")
        return replace(self, **{name: getattr(self, name).keep(width=width, depth=depth) for name in names})


@dataclass(frozen=True)
class NamedRow:
    """A row for one parameter instead of a role, as `derive` measures it. Its powers are of the model's ratios."""

    template: str
    rule: Rule  # for the Adam family
    role: Role | None = None  # what it is taken for, if its role cannot be found: its place, and matrix or vector

    def in_column(self, column: "Column") -> Rule | None:
        """The rule for another optimizer. SGD's step is the gradient, whose size is that of ε."""
        if column is Column.ADAM:
            return self.rule
        if column is not Column.SGD:
            return None
        lr = self.rule.lr / self.rule.eps
        return replace(self.rule, lr=lr, weight_decay=ONE / lr, eps=ONE)


class Column(StrEnum):
    """Groups of optimizers, by how the step depends on the size of the gradient."""

    ADAM = "Adam family"
    SGD = "SGD"
    MUON = "Muon"


FORWARD = ("branch", "logits", "attention", "embedding")  # the multipliers of the forward pass


@dataclass(frozen=True)
class Rules:
    """A parameterization: one rule per optimizer column and role, and the multipliers of the forward pass."""

    key: str  # its identity: what `rules_named` reads and what runs store
    name: str  # how it is displayed
    columns: Mapping[Column, Mapping[Role, Rule]]
    branch: Power  # on the output of every residual branch
    logits: Power  # on the product of the readout matrix with the final stream; the bias stays outside
    attention: Power  # the scale wanted on q·k, relative to the base's, in d_head / d_head_base
    embedding: Power  # on an embedding that the model itself multiplies by sqrt(N), as Gemma does
    named: tuple[NamedRow, ...] = ()  # rows by name, which come before the rows by role
    axes: tuple[tuple[str, str, int], ...] = ()  # (further axis, a parameter that grows with it, along which dimension)

    def rule_of(self, template: str, role: Role, column: Column = Column.ADAM) -> Rule:
        """The rule of one parameter: the row with its name, or the one of its role."""
        row = next((row for row in self.named if row.template == template), None)
        if row is None:
            return self.rule(role, column)
        rule = row.in_column(column)
        if rule is None:
            what = f"the rule of '{template}' was measured for the Adam family and SGD, not for {column}"
            raise UserError(what, fix="give it to AdamW: param_groups(..., roles=[...])")
        return rule

    @property
    def named_roles(self) -> dict[str, Role]:
        """The roles that the rows by name give to parameters without one."""
        return {row.template: row.role for row in self.named if row.role is not None}

    def rule(self, role: Role, column: Column = Column.ADAM) -> Rule:
        rows = self.columns.get(column, {})
        if role not in rows:
            fix = f"give that role to AdamW: param_groups(..., roles=[...]); {column} takes: {', '.join(rows)}"
            raise UserError(f"{self.name} has no {column} rule for the role '{role}'", fix=fix)
        return rows[role]

    def keep(self, *, width: bool, depth: bool) -> "Rules":
        """These rules, without their width or depth factors where those are False."""
        powers = {name: getattr(self, name).keep(width=width, depth=depth) for name in FORWARD}
        columns = {
            column: {role: rule.keep(width=width, depth=depth) for role, rule in rows.items()}
            for column, rows in self.columns.items()
        }
        named = tuple(replace(row, rule=row.rule.keep(width=width, depth=depth)) for row in self.named)
        return replace(self, columns=columns, named=named, **powers)

    def without_width(self, exponent: float, m_N: float) -> float:
        """The factor on an embedding that the model itself multiplies by N^exponent."""
        root = self.embedding(m_N)  # for N^1/2
        return float(root ** (2 * exponent))

    def effect(self, *, wider: bool, deeper: bool) -> Hashable:
        """What is left of the rules at a shape that is wider or deeper than the base, or neither.

        Two parameterizations with the same effect at a shape are the same run there.
        """

        def left(rule: Rule) -> Rule:
            return replace(rule.keep(width=wider, depth=deeper), source="")

        rows = tuple((role, left(rule)) for role, rule in sorted(self.columns[Column.ADAM].items()))
        named = tuple(replace(row, rule=left(row.rule)) for row in self.named)
        return rows, named, tuple(getattr(self, name).keep(width=wider, depth=deeper) for name in FORWARD)

    def __repr__(self) -> str:
        return f"<rules {self.name}>"


def _adam(a: float) -> dict[Role, Rule]:
    depth_lr = Power(depth=a - 1)  # Desideratum 2: each branch moves the stream by Θ(1/L)
    outer_eps = Power(width=-1)  # ε follows the gradient's own size (App. D.5)
    block_eps = Power(out=-1, depth=-a)  # a gradient is divided among the outputs that it flows back from
    hidden = Rule(
        init_std=Power(width=-1 / 2),
        lr=Power(width=-1, depth=a - 1),
        weight_decay=Power(width=1),
        eps=block_eps,
        source=f"{TABLE_1}; {WEIGHT_DECAY}",
    )
    return {
        Role.EMBEDDING: Rule(eps=outer_eps),
        Role.EMBEDDING_BIAS: Rule(eps=outer_eps, source="derived: an embedding row that every input shares"),
        Role.HIDDEN: hidden,
        Role.EXPERT: replace(hidden, source=EXPERTS),  # its fan-out counts the experts, so ε also falls as 1/E
        Role.ROUTER: replace(hidden, source=ROUTER),  # its fan-out is the number of experts, so ε does not see N
        Role.HIDDEN_BIAS: Rule(lr=depth_lr, eps=block_eps),
        Role.BLOCK_NORM: Rule(lr=depth_lr, eps=block_eps),
        Role.BLOCK_TABLE: Rule(lr=depth_lr, eps=block_eps, source=TABLES),
        Role.BLOCK_VECTOR: Rule(lr=depth_lr, eps=block_eps, source=VECTORS),
        Role.QK_NORM: Rule(lr=depth_lr, eps=Power(depth=-a), source=OVER_HEADS),
        Role.STREAM_SCALE: Rule(lr=Power(depth=-1), source=STREAM),
        Role.FINAL_NORM: Rule(eps=outer_eps, source=f"{TABLE_1}; ε derived: the gradient passes the logit multiplier"),
        Role.HEAD: replace(hidden.keep(width=True, depth=False), source=HEADS),
        Role.HEAD_BIAS: Rule(eps=outer_eps, source=HEADS),
        Role.UNEMBEDDING: Rule(eps=outer_eps),
        Role.UNEMBEDDING_BIAS: Rule(source="derived: the bias stands outside the logit multiplier, so nothing scales"),
    }


def _sgd(a: float) -> dict[Role, Rule]:
    """SGD's step is the gradient, so the learning rate cancels the gradient's own m_N^-1 · m_L^-a.

    Weight decay is chosen so that lr · λ, the shrinkage per step, is the same as AdamW's.
    """
    source = "derived from the gradient sizes of App. D.5; cf. Bordelon et al. 2024, Table 1"
    outer = Rule(lr=Power(width=1), weight_decay=Power(width=-1), source=source)
    vector = Rule(lr=Power(out=1, depth=2 * a - 1), source=source)
    hidden = Rule(
        init_std=Power(width=-1 / 2),
        lr=Power(width=-1, out=1, depth=2 * a - 1),
        weight_decay=Power(width=1, out=-1, depth=-a),
        source=source,
    )
    return {
        Role.EMBEDDING: outer,
        Role.EMBEDDING_BIAS: outer,
        Role.HIDDEN: hidden,
        Role.EXPERT: hidden,
        Role.ROUTER: hidden,
        Role.HIDDEN_BIAS: vector,
        Role.BLOCK_NORM: vector,
        Role.BLOCK_TABLE: replace(vector, weight_decay=Power(out=-1, depth=-a)),
        Role.BLOCK_VECTOR: vector,
        Role.QK_NORM: Rule(lr=Power(depth=2 * a - 1), source=source),
        Role.STREAM_SCALE: Rule(lr=Power(depth=-1), source=source),
        Role.FINAL_NORM: outer,
        Role.HEAD: hidden.keep(width=True, depth=False),
        Role.HEAD_BIAS: outer,
        Role.UNEMBEDDING: outer,
        Role.UNEMBEDDING_BIAS: Rule(source=source),
    }


def _muon(a: float) -> dict[Role, Rule]:
    """An orthogonalised step × sqrt(fan_out / fan_in) has the right size at any width; only a depth factor remains."""
    hidden = Rule(
        init_std=Power(width=-1 / 2), lr=Power(depth=a - 1), source="derived: spectral step × sqrt(fan_out/fan_in)"
    )
    # The step of one expert does not depend on the size of its gradient, so the number of experts has no factor.
    expert = replace(hidden, source="derived: a hidden weight, orthogonalised expert by expert; measured by check")
    return {Role.HIDDEN: hidden, Role.EXPERT: expert}


def alpha(a: float) -> Rules:
    """The paper's family: residual branches × m_L^-a and the matching settings, for a in [0.5, 1]."""
    if isinstance(a, bool) or not isinstance(a, (int, float)) or not 0.5 <= a <= 1:
        fix = "use 0.5 to 1 (CompleteP); below, the stream explodes with depth; above, the blocks stop learning"
        raise UserError(f"alpha({a!r}): alpha must lie in [0.5, 1]", fix=fix)
    return Rules(
        key="completep" if a == 1 else f"alpha={a:g}",
        name="CompleteP" if a == 1 else f"alpha={a:g}",
        columns={Column.ADAM: _adam(a), Column.SGD: _sgd(a), Column.MUON: _muon(a)},
        branch=Power(depth=-a),
        logits=Power(width=-1),
        attention=Power(width=-1),
        embedding=Power(width=-1 / 2),
    )


def flat_eps(a: float) -> Rules:
    """alpha without the depth factor of ε: the comparison in the paper's ablation of that rule."""
    rules = alpha(a)
    adam = {
        role: replace(rule, eps=rule.eps.keep(width=True, depth=False))
        for role, rule in rules.columns[Column.ADAM].items()
    }
    name = f"{rules.name} without the depth rule for ε"
    return replace(rules, key=f"flat-eps={a:g}", name=name, columns={Column.ADAM: adam})


def literature(a: float) -> Rules:
    """alpha as described before the paper: biases, norms and ε have no depth factor. Unstable; a negative control."""
    rules = flat_eps(a)
    source = "Bordelon et al. 2023, Yang et al. 2023: not considered"
    adam = {
        role: replace(rule, lr=ONE, source=source) if role.trait.inside and not role.trait.matrix else rule
        for role, rule in rules.columns[Column.ADAM].items()
    }
    return replace(rules, key=f"literature={a:g}", name=f"literature alpha={a:g}", columns={Column.ADAM: adam})


COMPLETEP = alpha(1)
MUP = replace(COMPLETEP.keep(width=True, depth=False), key="mup", name="muP")
SP = replace(COMPLETEP.keep(width=False, depth=False), key="sp", name="SP")


def raised_embedding() -> Rules:
    """SP with the embedding's learning rate × m_N: what muP amounts to under AdamW, according to its critics."""
    source = "arXiv 2605.21486: the embedding's learning rate is what SP lacks"
    adam = dict(SP.columns[Column.ADAM])
    adam[Role.EMBEDDING] = replace(adam[Role.EMBEDDING], lr=Power(width=1), source=source)
    return replace(SP, key="sp-embedding", name="SP, embedding lr × m_N", columns={Column.ADAM: adam})


@cache
def rules_named(key: str) -> Rules:
    """The rules for a key: `sp`, `mup`, `completep`, `alpha=0.75`, `literature=0.5`, `flat-eps=1` or
    `sp-embedding`, in any case."""
    word, _, value = key.strip().lower().partition("=")
    fixed = {rules.key: rules for rules in (SP, MUP, COMPLETEP, raised_embedding())}
    families = {"alpha": alpha, "literature": literature, "literature alpha": literature, "flat-eps": flat_eps}
    if word in fixed and not value:
        return fixed[word]
    if word in families and value:
        try:
            return families[word](float(value))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
    what = f"no rules named {key!r}"
    raise UserError(what, fix="use sp, mup, completep, alpha=0.5 … alpha=1, literature=0.5, flat-eps=1 or sp-embedding")


def as_rules(value: Rules | str) -> Rules:
    """Rules as they are, or the rules that a key names."""
    if isinstance(value, str):
        return rules_named(value)
    if not isinstance(value, Rules):
        raise UserError(f"rules={value!r} are not rules", fix="use SP, MUP, COMPLETEP or alpha(0.5 … 1)")
    return value


def display_name(key: str) -> str:
    """The display name of the rules with this key; any other text is returned as it is."""
    rules = known_rules(key)
    return key if rules is None else rules.name


def known_rules(key: str) -> Rules | None:
    try:
        return rules_named(key)
    except UserError:
        return None


@dataclass(frozen=True)
class OptimizerKind:
    """What the table and the folded form need to know about an optimizer."""

    column: Column
    eps: float | None = None  # its default ε; None if it has none
    decoupled: bool = True  # weight decay acts on the weight directly, not through the gradient
    state: Mapping[str, int] | None = None  # its state tensors, with the power of the gradient in each


ADAM_STATE = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
# Adagrad, Lion and SignSGD take Adam's learning rates (App. D.1: "well-normalized Adam-like algorithms").
OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(Column.ADAM, eps=1e-8, state=ADAM_STATE),
    "adam": OptimizerKind(Column.ADAM, eps=1e-8, decoupled=False, state=ADAM_STATE),
    "adagrad": OptimizerKind(Column.ADAM, eps=1e-10, decoupled=False, state={"sum": 2}),
    "lion": OptimizerKind(Column.ADAM, state={"exp_avg": 1}),
    "signsgd": OptimizerKind(Column.ADAM, state={"momentum_buffer": 1}),
    "sgd": OptimizerKind(Column.SGD, state={"momentum_buffer": 1}),
    "muon": OptimizerKind(Column.MUON, state={"momentum_buffer": 1}),
}


def optimizer_kind(optimizer: object) -> OptimizerKind:
    """The entry for an optimizer given by name, class or instance. Unknown optimizers are refused."""
    if not isinstance(optimizer, (str, type)):
        optimizer = type(optimizer)
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    kind = OPTIMIZERS.get(name.lower().replace("_", "").replace("-", ""))
    if kind is None:
        what = f"the table has no rule for the optimizer {name!r}"
        fix = f"use one of {', '.join(OPTIMIZERS)}; if yours steps exactly like one of them, pass that name"
        raise UserError(what, fix=fix)
    return kind


def muon_shape_factor(fan_out: int, fan_in: int, rows: int, columns: int) -> float:
    """sqrt(fan_out / fan_in), without the sqrt(max(1, rows / columns)) that torch.optim.Muon applies itself."""
    return float((fan_out / fan_in / max(1.0, rows / columns)) ** 0.5)


def power_of(value: float, ratio: float) -> float | None:
    """The exponent, a multiple of 1/4, for which `value` is a power of `ratio`; None if there is none.

    Measured numbers have rounding errors, and settings should not.
    """
    if not (math.isfinite(value) and value > 0):
        return None
    exponent = 0.0 if ratio == 1 else round(4 * math.log(value) / math.log(ratio)) / 4
    return exponent if abs(value / ratio**exponent - 1) < 5e-3 else None


def as_power(value: float, ratio: float) -> float:
    """A measured value as the power of `ratio` that it is, or rounded to four digits if it is none."""
    exponent = power_of(value, ratio)
    return float(f"{value:.4g}") if exponent is None else float(ratio**exponent)


@dataclass(frozen=True)
class Folded:
    """How settings change when y = c·W x becomes y = W'x with W' = cW: the same training run without a multiplier."""

    lr: float
    weight_decay: float
    eps: float

    @staticmethod
    def by(c: float, column: Column) -> "Folded":
        if column is Column.SGD:  # the step is the gradient, which is multiplied by 1/c when the weight is by c
            return Folded(lr=c * c, weight_decay=1 / (c * c), eps=1.0)
        return Folded(lr=c, weight_decay=1 / c, eps=1 / c)


@dataclass(frozen=True)
class Horizon:
    """Transfer over batch size and duration, m_S = steps / base steps (Complete(d)P, arXiv 2512.22382). Opt-in.

    Published exponents range from 0.28 to 0.5, so the exponent is a setting.
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 1:
            what = f"horizon exponent {self.exponent!r}: must lie in [0, 1]"
            raise UserError(what, fix="use a published value, from 0.28 to 0.5")

    def lr(self, m_S: float) -> float:
        return float(m_S**-self.exponent)

    def weight_decay(self, m_S: float) -> float:
        return float(m_S**-self.exponent)

    def eps(self, m_S: float) -> float:
        return float(m_S**self.exponent)

    @staticmethod
    def beta(beta: float, m_S: float) -> float:
        """1 - β is proportional to 1 / m_S, so that the average covers the same share of the run."""
        return max(0.0, 1 - (1 - beta) / m_S)
