"""How what an agent records gets to the collector, and what the collector says gets to the agent."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..collector.config import RankdConfig
from ..collector.protocol.messages import Report
from ..collector.protocol.wording import counted
from .about import own_collector
from .commands import Commands
from .discovery import ENDPOINT_VARIABLE, EndpointFinder
from .identity import Identity, introduction
from .launch import start_collector
from .link import LinkState
from .nodes import job_of, known_as
from .outbox import Outbox
from .recover import Leftovers
from .sender import Sender
from .spools import ABOUT_SPOOL, open_store, tidy, what_is_left

__all__ = ["Delivery"]

log = logging.getLogger("rankd.agent")

# What a delivery of others' leftovers may take to notice that this process ends.
_LEFTOVERS_END = 0.5


class Delivery:
    """The outbox with its spool, the sender, and what older processes of this rank have left.

    Args:
        config: the `rankd:` section.
        who: this rank. Rank 0 starts the collector, unless one is to be started otherwise.
        total_steps: the length of the training; None: not known.
        about: facts about this process, for its hello.
        position: the (step, micro_step) that training is at; called by the sender's thread.

    Attributes:
        commands: what is done when the collector says so; handlers are added before `start`.
    """

    def __init__(
        self,
        config: RankdConfig,
        who: Identity,
        total_steps: int | None,
        about: Mapping[str, str],
        position: Callable[[], tuple[int, int]],
    ) -> None:
        self._config = config
        self._who = who
        finder = EndpointFinder(config.endpoint, os.environ, Path(config.output))
        starts_one = config.start_collector and ENDPOINT_VARIABLE not in os.environ
        if who.rank == 0 and starts_one:
            start_collector(config, known_as(os.environ, who.world_size, socket.gethostname()))
        told = {**about, "job": job_of(os.environ), **(own_collector(config.output) if starts_one else {})}
        self._leftovers = Leftovers(config.spool.place(config.output), who.rank, finder)
        store, hello = open_store(config, introduction(who, total_steps, told))
        self._spool = hello.about.get(ABOUT_SPOOL)
        self.outbox = Outbox(store)
        self.commands = Commands(hello.session, finder.key)
        find = self._leftovers.find_endpoint
        self._sender = Sender(self.outbox, hello, find, where=finder.where, position=position, obey=self.commands.obey)

    def start(self) -> None:
        """Begin to deliver."""
        self._sender.start()
        self._leftovers.start()

    @property
    def connected(self) -> bool:
        """Whether the collector has welcomed this rank and is heard."""
        return self._sender.state is LinkState.JOINED

    def put(self, raws: list[bytes], records: int = 0, at: tuple[int, int | None] | None = None) -> bool:
        """Items to deliver, as `Outbox.put`; False: there is no room for them, and they are counted."""
        accepted = self.outbox.put(raws, records=records, at=at)
        self._sender.wake()
        return accepted

    def report(self, report: Report) -> None:
        """Have something told to the collector, from any thread; it may get lost with the connection."""
        self._sender.report(report)

    def settle(self) -> None:
        """Wait until all is with the collector, at most `exit_timeout` seconds."""
        self._sender.settle(self._config.exit_timeout)

    def close(self, reason: str) -> None:
        """Say goodbye and wait for the last acknowledgements, at most `exit_timeout` seconds; warns of what is left."""
        self.outbox.finish(reason, time.time())
        # Meanwhile what an older process of this rank has left goes on being delivered: it comes first, and this waits.
        left = self._sender.close(self._config.exit_timeout)
        self._leftovers.stop()
        self.outbox.close()
        tidy(self._spool)
        self._leftovers.join(_LEFTOVERS_END)
        if left:
            said = "the collector did not acknowledge %s of rank %s within %g s; %s"
            log.warning(
                said, counted(left, "item"), self._who.rank, self._config.exit_timeout, what_is_left(self._spool)
            )
