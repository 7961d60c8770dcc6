"""The parameters and modules of one model, by what is measured on them.

To walk the modules of a deep model takes as long as a forward pass, so all seeds of one model share its layout.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from completep.anatomy.kinds import is_convolution, is_linear
from completep.anatomy.names import named_parameters
from completep.anatomy.roles import Anatomy


@dataclass(frozen=True, eq=False)
class Layout:
    """What is found by names and classes. Values of parameters are no part of it."""

    model: nn.Module
    anatomy: Anatomy

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, as in `named_parameters`."""
        return dict(named_parameters(self.model))

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules())

    @cached_property
    def depths(self) -> dict[str, int]:
        """The number of blocks in each stack, by stem."""
        return {stack.stem: stack.depth(self.parameters) for stack in self.anatomy.stacks}

    @cached_property
    def blocks(self) -> list[nn.Module]:
        stacks = self.anatomy.blocks
        return [module for name, module in self.modules.items() if any(s.pattern.fullmatch(name) for s in stacks)]

    @cached_property
    def products(self) -> dict[str, nn.Module]:
        """Linear layers and convolutions."""
        return {name: module for name, module in self.modules.items() if is_linear(module) or is_convolution(module)}

    @cached_property
    def linears(self) -> dict[str, nn.Module]:
        """By weight: linear layers in the blocks. The columns of Hugging Face's Conv1D are its outputs."""
        inside = [name for name in self.parameters if name.endswith(".weight") and self._is_inner_matrix(name)]
        holders = {name: self.model.get_submodule(name.rpartition(".")[0]) for name in inside}
        return {name: module for name, module in holders.items() if isinstance(module, nn.Linear)}

    def _is_inner_matrix(self, name: str) -> bool:
        trait = self.anatomy.part(name).role.trait
        return trait.inside and trait.matrix

    @cached_property
    def vectors(self) -> list[tuple[nn.Module, dict[str, nn.Parameter]]]:
        """Innermost modules, each with the trainable vectors that it holds: gains and biases."""
        holders = []
        for name, module in self.modules.items():
            own = module.named_parameters(recurse=False)
            vectors = {f"{name}.{n}": p for n, p in own if p.dim() == 1 and p.requires_grad}
            if vectors and not any(True for _ in module.children()):
                holders.append((module, vectors))
        return holders
