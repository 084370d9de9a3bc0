"""Ends a run whose ranks wait for one that hangs or has died, and says which rank that is.

Each rank notes the step and phase that it is in, in the store that the process group has anyway. A thread on each rank
looks at its own progress; when there has been none for the timeout, it reads everybody's notes, prints them, and ends
the process: a launcher then ends the rest. No collective is involved, so nothing here can hang with the run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

EXIT_STATUS = 75
"""Exit status of a rank that the watchdog ended (EX_TEMPFAIL: starting again may help)."""


class Watchdog:
    """Watches this rank's progress.

    Args:
        store: a torch.distributed store that all ranks reach.
        rank, world_size: this process's place.
        timeout_s: seconds without a note after which the run is over.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self._last = time.monotonic()
        self._closed = threading.Event()
        self.note("starts")
        self._thread = threading.Thread(target=self._watch, name="disco_ds-watchdog", daemon=True)
        self._thread.start()

    def note(self, doing: str) -> None:
        """This rank has got as far as ``doing``, such as "step 12: waits for data"."""
        self._last = time.monotonic()
        self.store.set(self._key(self.rank), f"{time.time():.0f} {doing}")

    def close(self) -> None:
        """The run has ended well."""
        self._closed.set()

    def _key(self, rank: int) -> str:
        return f"disco_ds/progress/{rank}"

    def _watch(self) -> None:
        while not self._closed.wait(min(self.timeout_s / 10, 5.0)):
            silent_s = time.monotonic() - self._last
            if silent_s > self.timeout_s:
                sys.stderr.write(self.report(silent_s))
                sys.stderr.flush()
                os._exit(EXIT_STATUS)

    def report(self, silent_s: float) -> str:
        """Who was last seen where, the rank that is furthest behind first."""
        lines = []
        for rank in range(self.world_size):
            try:
                when, _, doing = self.store.get(self._key(rank)).decode().partition(" ")
                lines.append((float(when), f"  rank {rank}: {doing} ({time.time() - float(when):.0f} s ago)"))
            except Exception as error:  # the store's host may be the one that died
                lines.append((0.0, f"  rank {rank}: unknown ({type(error).__name__}: the store on rank 0 is gone)"))
        lines.sort()
        return (
            f"[rank {self.rank}] no progress for {silent_s:.0f} s (timeout_minutes), the run ends. Last seen, longest "
            f"ago first:\n" + "\n".join(line for _, line in lines) + "\n"
        )
