"""Gradients of a backward pass that somebody else runs, by hooks on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["GradientHooks", "parameters_of"]


class GradientHooks:
    """Keeps the gradient that each parameter got in the last backward pass, until it is taken.

    A hook sees the micro-batch's own gradient, scaled as the loss was. It only keeps a reference: an exception in it
    would go into the training, and could not be removed from there again.

    Args:
        parameters: all parameters, in the order of `take`.
        wanted: by name, which of them get a hook.
    """

    def __init__(self, parameters: Sequence[Any], wanted: Callable[[str], bool]) -> None:
        self._gradients: list[object | None] = [None] * len(parameters)
        self._handles = [
            parameter.register_hook(self._hook(place))
            for place, parameter in enumerate(parameters)
            if wanted(parameter.name)
        ]

    def take(self) -> list[object | None]:
        """The gradients since the last call, in the order of the parameters; None where there was none."""
        taken = list(self._gradients)
        self._gradients[:] = [None] * len(taken)
        return taken

    def remove(self) -> None:
        """Take the hooks off again."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self.take()

    def _hook(self, place: int) -> Callable[[object], None]:
        # The same list all the time: a hook that the framework has kept must not fail later on either.
        gradients = self._gradients

        def keep(gradient: object) -> None:
            gradients[place] = gradient

        return keep


def parameters_of(model: object) -> list[Any]:
    """The trainable parameters of a cell, or of a list of cells, in the order of `trainable_names`."""
    chunks: Sequence[Any] = model if isinstance(model, list | tuple) else [model]
    return [parameter for chunk in chunks for parameter in chunk.trainable_params()]
