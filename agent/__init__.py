"""Lives in the training process: measures, and pushes to the collector. `Agent` is what a training loop uses."""

from .agent import Agent, Step

__all__ = ["Agent", "Step"]
