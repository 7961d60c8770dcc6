"""Every number of the paper that is used as a number: recipes, laws and the sizes it ran.

"Don't be lazy: CompleteP enables compute-efficient deep transformers", with the corrections that its own text demands
(2E-08 in its experiment table is 2^-8, for instance; docs/paper-numbers.md lists them).
"""

from completep.config import Shape

BASE = Shape(width=256, depth=2)
VOCABULARY = 50257  # GPT-2's
SEQUENCE = 2048
HEAD_SIZE = 64

LR = 2**-8
STD = 0.02
EPS = 1e-16
BETAS = (0.9, 0.95)

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022; of all parameters, embeddings included
TAU = 0.1407  # AdamW's timescale: 1 / (η λ steps)
WARMUP_SHARE = 0.1
WARMUP_TOKENS = 375e6


def batch_law(flops: float) -> float:
    """Sequences per step from training FLOPs, before rounding to a multiple of 8 (Eqn. flops-bs)."""
    return max(32.0, float(0.7857 * flops**0.1527 - 306.8))


# The shapes on the compute-efficient frontier of CompleteP: non-embedding parameters → N:L (size table, bold rows).
BEST_RATIO = {50.4e6: 512 / 16, 302.3e6: 1024 / 24, 1512.3e6: 1984 / 32}
# N:L that stays within 1 % of the best loss at 1.5B, towards deeper models.
DEEPEST_RATIO_WITHIN_1_PERCENT = {"completep": 11.8, "mup": 38.7}
SCALING_EXPONENT = 0.0554  # b of Xhat(F) = (F/a)^-b under CompleteP
