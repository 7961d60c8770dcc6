"""What a run is made of, as frozen dataclasses."""

from dataclasses import dataclass

from completep.errors import UserError


@dataclass(frozen=True)
class Shape:
    """Width N (of the residual stream) and depth L (transformer layers, two residual branches each)."""

    width: int
    depth: int

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("depth", self.depth)):
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"Shape({name}={value!r}): must be a whole number of at least 1",
                    fix=f"give the base model's {name}",
                )
