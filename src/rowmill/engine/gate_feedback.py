"""The gatekeeper: what a lane's gates mean to its worker. Gates hear how runs ended, before others start."""

from __future__ import annotations

from collections.abc import Iterable

from ..store.gates.gate_learning import BreakerChange, GateLearning
from ..store.lane.claim import Settlement


class GateFeedback:
    """One lane's gates, as one worker minds them."""

    def __init__(self, notes: GateLearning) -> None:
        self.notes = notes
        #: Runs whose outcome is written and that the gates have not heard of yet.
        self.unheard: list[Settlement] = []
        #: The last claim came short: what ends here may let others go.
        self.held_back = False
        #: Outcomes on their way: a run counts as under way until the gates have heard how it ended, because whether
        #: the next may start depends on it.
        self.on_the_way = 0

    def occupied(self, outcomes: int) -> int:
        """Slots that are free and yet not to be given away."""
        return outcomes + len(self.unheard) + self.on_the_way if self.notes.decides else 0

    def ended(self, settlements: Iterable[Settlement]) -> None:
        """These are written."""
        self.unheard += settlements

    async def tell(self) -> list[BreakerChange]:
        """Let the gates hear what has ended; the breakers that turned."""
        batch, self.unheard = self.unheard, []
        self.on_the_way += len(batch)
        try:
            return await self.notes.note(batch)
        except BaseException:
            self.unheard[:0] = batch
            raise
        finally:
            self.on_the_way -= len(batch)
