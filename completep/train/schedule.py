"""The paper's schedule: linear warm-up, then linear decay to zero. A pure function of the step."""

from completep.config import Schedule


def lr_factor(step: int, schedule: Schedule) -> float:
    """What every group's learning rate is multiplied by at this step (from 0)."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    return (schedule.steps - step) / (schedule.steps - schedule.warmup)
