"""The paper's schedule: linear warm-up, then linear decay to zero."""

from completep.config import Schedule


def lr_factor(step: int, schedule: Schedule) -> float:
    """The factor on every learning rate at a step, counted from 0."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    return (schedule.steps - step) / (schedule.steps - schedule.warmup)
