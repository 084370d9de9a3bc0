"""What the run is asked for from outside, by signals."""

from __future__ import annotations

import signal
from typing import Any


class Signals:
    """Remembers SIGTERM (end the step in hand, save, stop) and SIGUSR1 (save and go on)."""

    def __init__(self) -> None:
        self.stop = self.save = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._received)

    def _received(self, number: int, _: Any) -> None:
        self.stop = self.stop or number == signal.SIGTERM
        self.save = self.save or number == signal.SIGUSR1

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        asked, self.save = self.save, False
        return asked
