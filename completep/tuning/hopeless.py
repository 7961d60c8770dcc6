"""When a run is hopeless, so a search may stop it early. The script must report its loss during training.

The rule: after a quarter of the steps, two reports in a row are more than 12 % above the loss of the best finished run
of the same shape and seed at the same step. Only the search with one seed stops runs; no verdict uses a stopped run.
The margin was chosen on the recorded curves of one seed, where it stops no run that ends within 8 % of the best.
On those of another seed the closest run that it stops ends 4.2 % above the best (tests/tuning/test_stopping.py).
"""

from collections.abc import Sequence
from itertools import pairwise

from completep.tuning.reading import Reading

MARGIN, EARLIEST, IN_A_ROW = 0.12, 0.25, 2


def hopeless(readings: Sequence[Reading], bar: Sequence[Reading]) -> bool:
    """Is a run with these losses hopeless, compared with `bar`, the curve of the best finished run?"""
    late = [r for r in readings if bar and EARLIEST * bar[-1].step <= r.step < bar[-1].step]
    if len(late) < IN_A_ROW:
        return False
    limits = [height(bar, r.step) for r in late[-IN_A_ROW:]]
    return all(
        limit is not None and limit > 0 and not r.loss <= (1 + MARGIN) * limit
        for r, limit in zip(late[-IN_A_ROW:], limits, strict=True)
    )


def height(curve: Sequence[Reading], step: float) -> float | None:
    """The curve between its readings; None before the first and after the last."""
    for left, right in pairwise(curve):
        if left.step <= step <= right.step:
            share = (step - left.step) / (right.step - left.step) if right.step > left.step else 0.0
            return left.loss + share * (right.loss - left.loss)
    return None
