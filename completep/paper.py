"""The paper's numbers that the code computes with: recipes, laws, and the shapes that were trained.

The paper is "Don't be lazy: CompleteP enables compute-efficient deep transformers". Some of its printed numbers
contradict its own text and are corrected here: 2E-08 in the experiment table is 2^-8, for instance.
docs/paper-numbers.md lists the corrections.
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

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022; counts all parameters, embeddings included
TAU = 0.1407  # AdamW's timescale: 1 / (η λ steps)
WARMUP_SHARE = 0.1
WARMUP_TOKENS = 375e6


BATCH_LAW = "max(32, 0.7857·F^0.1527 - 306.8)"


def batch_law(flops: float) -> float:
    """Sequences per step from training FLOPs, before rounding to a multiple of 8 (Eqn. flops-bs)."""
    return max(32.0, float(0.7857 * flops**0.1527 - 306.8))


# The best shapes of CompleteP at equal compute: non-embedding parameters → N:L (size table, bold rows).
BEST_RATIO = {50.4e6: 512 / 16, 302.3e6: 1024 / 24, 1512.3e6: 1984 / 32}
# The lowest N:L (the deepest model) whose loss is within 1 % of the best at 1.5B.
DEEPEST_RATIO_WITHIN_1_PERCENT = {"completep": 11.8, "mup": 38.7}
SCALING_EXPONENT = 0.0554  # b in the scaling law Xhat(F) = (F/a)^-b, fitted for CompleteP

# The transfer experiments at a fixed number of tokens: learning rate, init, epsilon, dynamics.
TRANSFER_TOKENS = 300e6
TRANSFER_BATCH = 128  # sequences; 1144 steps
TRANSFER_DEPTHS = (2, 4, 8, 16, 32, 64, 128)
LR_OCTAVES = (-12, -4)  # powers of two
STDS = tuple(STD * 2.0**e for e in range(-4, 4))
EPS_DECADES = (-16, -3)
CROSSING_LR = 2**-6  # the smallest η at which, under alpha=0.5, deeper models end below shallower ones

# The grid over η and λ has depth 6 and its own init (experiment table).
GRID_DEPTH, GRID_STD = 6, 0.09
GRID_WIDTHS, GRID_LR_OCTAVES, GRID_DECAY_OCTAVES = (256, 512), (-11, -5), (-4, 3)

# The coordinate check (experiment table), and the two-matrix networks of the laziness figure.
CHECK_STD, CHECK_LR, CHECK_BATCH, CHECK_STEPS = 0.06, 2e-3, 4, 10
LAZY_DEPTHS, LAZY_SEEDS, LAZY_WIDTH = (16, 32, 64, 128, 256, 512), 50, 256

# Every shape (width, depth) of the size table, deepest first.
SHAPES = {
    "50M": ((256, 63), (320, 40), (384, 28), (512, 16), (640, 10), (768, 7), (896, 5), (1024, 4), (1152, 3), (1408, 2)),
    "300M": ((448, 125), (640, 62), (832, 36), (1024, 24), (1280, 16), (1600, 10), (2048, 6), (2880, 3)),
    "1.5B": ((832, 179), (1152, 94), (1536, 53), (1984, 32), (2624, 18), (3520, 10), (4544, 6)),
}
HORIZON_TPP = 200
HORIZON_SHAPES = ((512, 16), (256, 63), (1024, 24), (448, 125))  # best and deepest of 50M and 300M
DOWNSTREAM_SHAPES = ((1984, 32), (832, 179))  # best and deepest of 1.5B
