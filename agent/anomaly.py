"""What a user is told of an anomaly, and what becomes of it besides a line in the log (`rankd.on_anomaly`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..collector.protocol.errors import RankdError

__all__ = ["Anomaly", "AnomalyError", "Reaction"]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A value that is not finite, or that has crossed a line of `rankd.alerts`, on this rank.

    Attributes:
        step, micro_step: where it was measured; micro_step None: it belongs to the whole step.
        rank: the global rank.
        metric: what was measured.
        value: the worst value.
        name: whose value that is (a parameter, a layer); None for a metric without names.
        text: all of it as a sentence, as it stands in the log.
    """

    step: int
    micro_step: int | None
    rank: int
    metric: str
    value: float
    name: str | None
    text: str


class AnomalyError(RankdError):
    """`rankd.on_anomaly` is `stop`, and there was an anomaly; the one error that rankd raises into a training loop.

    Attributes:
        anomaly: the first one at this place.
    """

    def __init__(self, anomaly: Anomaly) -> None:
        super().__init__(anomaly)
        self.anomaly = anomaly

    def __str__(self) -> str:
        return self.anomaly.text


class Reaction:
    """Keeps the anomalies until training is at a place where something can be done about them.

    Args:
        stops: there is an error to raise then.
        tell: the user's own callback; None: there is none.
        trouble: takes where it happened, and the error, when the callback raises.
    """

    def __init__(
        self,
        stops: bool,
        tell: Callable[[Anomaly], object] | None,
        trouble: Callable[[str, Exception], None],
    ) -> None:
        self._stops = stops
        self._tell = tell
        self._trouble = trouble
        self._waiting: list[Anomaly] = []
        self._stopped_in = 0

    def found(self, anomalies: Iterable[Anomaly | None]) -> None:
        """These are in the log, or on the way there; None is none."""
        self._waiting += [anomaly for anomaly in anomalies if anomaly is not None]

    def act(self) -> AnomalyError | None:
        """Call the callback for each; the error to raise, if any was found and the training is to stop.

        One a step is enough: what an adapter still records of the step must not raise another on the way out.
        """
        if not self._waiting:
            return None
        # First, because the callback may record something, and so come back here.
        found, self._waiting = self._waiting, []
        for anomaly in found:
            self._call(anomaly)
        if not self._stops or found[0].step == self._stopped_in:
            return None
        self._stopped_in = found[0].step
        return AnomalyError(found[0])

    def _call(self, anomaly: Anomaly) -> None:
        if self._tell is None:
            return
        try:
            self._tell(anomaly)
        except Exception as error:  # noqa: BLE001 - it is the user's, and must not stop the training
            self._trouble("the callback on_anomaly", error)
