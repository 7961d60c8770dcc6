"""Write docs/paper-numbers.md: python docs/paper_numbers.py > docs/paper-numbers.md"""

import csv
from pathlib import Path

from completep import paper
from completep.compute import flops
from completep.compute.laws import PowerLaw, flop_savings, loss_increase
from completep.compute.plan import plan_shape
from completep.config import GPTConfig

TABLE = Path(__file__).parent.parent / "tests" / "compute" / "size_table.csv"

TEXT = """# Where the paper's numbers come from

This page has every number of *Don't be lazy: CompleteP enables compute-efficient deep transformers* that completep
uses, how completep computes it, and where the paper contradicts itself.

## Counting

N is the width, L the depth, V = 50257 the size of the vocabulary, and T = 2048 the number of tokens per sequence.

- **Non-embedding parameters**: 12 N² L + 13 N L (matrices, biases and norms of the blocks). **Total**: that + 2 N
  (final norm) + 2 V N (embedding and unembedding).
- **Training FLOPs per token**: 3 × [2 (12 N² L + V N) + 4 T N L] + 4 V N + small terms. A product of m×n×k costs 2mnk,
  and its backward pass twice that. Attention is counted over all T, without the causal half. The input embedding is
  counted as a dense one-hot product, forward and weight gradient only (4 V N). The small terms are softmax and norms at
  3 FLOPs per element and the nonlinearity at 1, with a backward pass of twice that, and biases at 1 in each direction.
  Any total of small terms between 291 and 345 · N · L reproduces the table; ours is about 336.
- **Tokens** D = 20 × total parameters. **Batch** B = max(32, 0.7857 · F^0.1527 - 306.8), rounded to the nearest
  multiple of 8. **Steps** = floor(D / (B · T)).
- **Weight decay** λ = 1 / (τ · η · steps), τ = 0.1407. **Warm-up** min(10 % of steps, 375M tokens), then linear decay
  to zero.

The matrix products agree with `torch.utils.flop_counter` exactly, forward and backward
(`tests/compute/test_flops.py`).

## The size table, recomputed

Each cell is computed by completep. All {cells} cells agree with the printed ones; a cell that differed would show both
values.

{table}

## Savings

With Xhat(F) = (F/a)^-b and d = (X - Xhat) / X, the FLOPs saved over muP are 1 - (1 - (d_muP - d))^(1/b). With
b = 0.0554 and the published losses:

| model | parameterization | published | recomputed |
|---|---|---|---|
{savings}

## Where the paper contradicts itself, and what we use

1. The depth exponent of the hidden learning rate is α - 1 everywhere; "L^(1-α)" under Desideratum 2 is a typo.
2. The first and last norms keep η, as in Table 1; the appendix line that repeats L^(α-1) for them is a mistake.
3. "η_base = 2E-08" in the experiment table is 2^-8 = 0.0039.
4. Norms start at gain 1 and bias 0, not at variance σ².
5. The exponent of the FLOP savings is 1/b. The printed -1/b gives -13 % and -52 % where the paper reports 11.8 % and
   34.4 %.
6. Xhat(F) = (F/a)^-b inverts to F = a · X^(-1/b).
7. A block's update moves the stream by Θ(1/L) in RMS, so its squared norm by Θ(1/L²), not Θ(1/L).
"""


def cell(ours: str, printed: str) -> str:
    """Our value, and the printed one where it differs."""
    return ours if ours == printed else f"{ours} (printed {printed})"


def size_rows():
    for row in csv.DictReader(TABLE.read_text().splitlines()):
        model = GPTConfig(width=int(row["width"]), depth=int(row["depth"]))
        planned = plan_shape(model)
        ours = {
            "params_non_embedding_M": f"{flops.non_embedding(model) / 1e6:.1f}",
            "params_total_M": f"{flops.total(model) / 1e6:.1f}",
            "tokens_B": f"{20 * flops.total(model) / 1e9:.1f}",
            "train_flops": f"{planned.flops:.2E}",
            "steps": str(planned.run.schedule.steps),
            "batch": str(planned.run.batch),
        }
        yield [row["label"], row["width"], row["depth"], *(cell(value, row[name]) for name, value in ours.items())]


def savings_rows():
    b, best = paper.SCALING_EXPONENT, 2.286
    law = PowerLaw(a=3.99e20 * best ** (1 / b), b=b)
    for label, budget, losses, printed in (
        ("optimal (1984×32)", 3.99e20, (2.302, 2.326, 2.286), (-19.6, 11.8)),
        ("deepest (832×179)", 4.10e20, (2.386, 2.417, 2.330), (-23.7, 34.4)),
    ):
        mup, half, complete = (loss_increase(x, law.loss(budget)) for x in losses)
        for name, d, value in (("α = 0.5", half, printed[0]), ("CompleteP", complete, printed[1])):
            yield [label, name, f"{value} %", f"{100 * float(flop_savings(mup, d, b)):.1f} %"]


def markdown(rows) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page() -> str:
    head = ["label", "N", "L", "non-embedding, M", "total, M", "tokens, B", "train FLOPs", "steps", "batch"]
    rows = list(size_rows())
    table = markdown([head, ["---"] * len(head), *rows])
    return TEXT.format(table=table, savings=markdown(savings_rows()), cells=6 * len(rows))


if __name__ == "__main__":
    print(page(), end="")
