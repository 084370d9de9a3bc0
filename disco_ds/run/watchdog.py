"""Ends a run whose ranks wait for one that hangs, and says which rank hangs or has died.

Each rank writes the step and phase that it is in to the process group's store. A thread looks at its rank's progress;
when there has been none for the timeout, it prints where everybody was last seen and ends the process: a launcher then
ends the rest. No collective is involved, so nothing here can hang with the run.

A rank that dies shows to its peers as a lost connection, which names nobody: the thread also writes a pulse, and a rank
whose collective has failed looks whose pulse has stopped.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from disco_ds.errors import CheckpointError, DataError, DivergedError

EXIT_STATUS = 75
"""Exit status of a rank that the watchdog ended (EX_TEMPFAIL: starting again may help)."""
PULSE_S = 2.0
_CONNECTION = re.compile(r"gloo|nccl|connection|store|socket|process ?group|broken pipe", re.IGNORECASE)


class Watchdog:
    """Watches this rank's progress; over when there has been none for ``timeout_s`` seconds. Needs a process group."""

    def __init__(self, timeout_s: float) -> None:
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own: that of the process group is locked while a rank waits for another in it
        self.store = store.clone() if hasattr(store, "clone") else store  # from torch 2.9
        self.rank, self.world_size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._period_s = min(timeout_s / 10, PULSE_S)
        self._pulse(0)
        self.progress("starts")
        self._thread = threading.Thread(target=self._watch, name="disco_ds-watchdog", daemon=True)
        self._thread.start()

    def progress(self, doing: str) -> None:
        """This rank has got as far as ``doing``, such as "step 12: waits for data"."""
        self._last = time.monotonic()
        self.store.set(self._key(self.rank), f"{time.time():.0f} {doing}")

    def close(self) -> None:
        """The run has ended well."""
        self._closed.set()

    def _key(self, rank: int, what: str = "progress") -> str:
        return f"disco_ds/{what}/{rank}"

    def _read(self, rank: int, what: str = "progress") -> str:
        """What a rank has last said; empty if it has not, where a store's ``get`` would wait for it."""
        key = self._key(rank, what)
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _pulse(self, beat: int) -> None:
        with suppress(Exception):  # the store goes with rank 0; whoever needs it next says so
            self.store.set(self._key(self.rank, "pulse"), str(beat))

    def _watch(self) -> None:
        beat = 0
        while not self._closed.wait(self._period_s):
            beat += 1
            self._pulse(beat)
            silent_s = time.monotonic() - self._last
            if silent_s > self.timeout_s:
                sys.stderr.write(self.report(silent_s))
                sys.stderr.flush()
                os._exit(EXIT_STATUS)

    def blame(self, error: BaseException) -> str:
        """Who is behind an error that has ended this rank's run; an empty string when it is this rank's own.

        For a lost connection it takes some seconds: the time for pulses to be missed.
        """
        told = isinstance(error, (DataError, CheckpointError, DivergedError))
        own = told or not isinstance(error, RuntimeError) or not _CONNECTION.search(str(error))
        try:
            self.tell(error if own else "")
            return "" if own else self._blame_others()
        except Exception:  # whatever the store's client raises when its host is gone
            return "rank 0 is gone: the store that it keeps for all ranks cannot be reached"

    def tell(self, error: BaseException | str) -> None:
        """Let the others know that this rank ends, and why."""
        self.store.set(self._key(self.rank, "failed"), str(error).strip().split("\n")[0][:300])

    def _blame_others(self) -> str:
        before = {rank: self._read(rank, "pulse") for rank in range(self.world_size)}
        time.sleep(3 * self._period_s)
        lines = []
        for rank, beat in before.items():
            doing = self._read(rank).partition(" ")[2] or "before it started"
            if self.store.check([self._key(rank, "failed")]):
                reason = self._read(rank, "failed")
                if reason:
                    lines.append(f"rank {rank} failed ({doing}): {reason}")
            elif self._read(rank, "pulse") == beat:
                lines.append(f"rank {rank} is gone (killed, or its machine lost); last seen: {doing}")
        return "; ".join(lines) or "all ranks are alive: a connection between two of them was lost"

    def report(self, silent_s: float) -> str:
        """Who was last seen where, the rank that is furthest behind first."""
        lines = []
        for rank in range(self.world_size):
            when, seen = "", "never seen"
            try:
                when, _, doing = self._read(rank).partition(" ")
                if when:
                    seen = f"{doing} ({time.time() - float(when):.0f} s ago)"
            except Exception as error:  # the store's host may be the one that died
                seen = f"unknown ({type(error).__name__}: the store on rank 0 is gone)"
            lines.append((float(when or 0), f"  rank {rank}: {seen}\n"))
        return (
            f"[rank {self.rank}] no progress for {silent_s:.0f} s (timeout_minutes), the run ends. Last seen, longest "
            f"ago first:\n" + "".join(line for _, line in sorted(lines))
        )
