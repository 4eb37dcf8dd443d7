"""Lives in the training process: measures, and pushes to the collector. `Agent` is what a training loop uses."""

from .agent import Agent, Step
from .anomaly import Anomaly, AnomalyError

__all__ = ["Agent", "Anomaly", "AnomalyError", "Step"]
