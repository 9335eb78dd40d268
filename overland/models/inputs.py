"""Which fields of a batch a model is given: those that its forward() names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor, nn

from overland.errors import ModelError


class Inputs:
    """The first parameter of forward() is what the model begins with, in a later stage of a
    pipeline what the stage before has returned. Others are given by name, where the batch has them;
    `**fields` takes all."""

    def __init__(self, model: nn.Module) -> None:
        self.model = type(model).__name__
        parameters = inspect.signature(model.forward).parameters.values()
        self.takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD,
                                                                one.KEYWORD_ONLY)]  # fmt: skip
        self.first, self.others = named[0], named[1:]

    def of(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What the model begins with, and all else by name."""
        if self.first not in fields:
            raise ModelError(
                f"{self.model} is given {self.first} first, which the data does not have: it has "
                f"{', '.join(fields)}"
            )
        return fields[self.first], self.beside_first(fields)

    def beside_first(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value
            for name, value in fields.items()
            if name != self.first and (self.takes_all or name in self.others)
        }
