"""How loader workers are started: from a server process that has neither threads nor sockets of the training.

A forked worker would inherit the rank's sockets, so that a killed rank looks alive to its peers, its signal handlers
and held locks. The fork server starts once a rank (about 3 s of one core); a worker then costs 0.1 s.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import cache
from multiprocessing import connection, forkserver, util
from typing import Any

import torch

PRELOAD = ["torch", "disco_ds.data.stream", "disco_ds.data.heldout", "__main__"]
"""What the server imports, so that no worker has to; "__main__" since multiprocessing imports it in every worker."""
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def warm_up(*needed: Any) -> None:
    """Let the fork server begin to import, without waiting for it. Without effect when it runs already.

    ``needed``: objects that will be sent to workers; the packages that they come from are imported too.
    """
    if START_METHOD == "forkserver":
        packages = {getattr(item, "__module__", "").partition(".")[0] for item in needed} - {"", "builtins", "__main__"}
        multiprocessing.set_forkserver_preload([*PRELOAD, *sorted(packages)])
        forkserver.ensure_running()


def prepare_worker(worker: int) -> None:
    """In a worker, before it reads: outlive a SIGTERM, and do not outlive the rank.

    Launchers send SIGTERM to every process, while the rank needs its batch to end its step and save. torch's own watch
    over the parent sees the fork server there, which lives as long as its workers.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """In a worker: end at once when the process that asked for it has died."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end() -> None:
            connection.wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=end, daemon=True).start()


@cache
def _end_workers_at_exit(process: int) -> None:
    """Once a process: kill loader workers that are alive when it ends.

    multiprocessing sends them SIGTERM then and waits, for ever where they ignore it. A finalizer runs before that, also
    in processes that multiprocessing started, where atexit would come too late.
    """

    def kill() -> None:
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()

    util.Finalize(None, kill, exitpriority=100)


def loader_options() -> dict[str, Any]:
    """Arguments of torch's DataLoader for data sets that batch by themselves."""
    _end_workers_at_exit(os.getpid())
    return {
        "batch_size": None,
        "worker_init_fn": prepare_worker,
        "multiprocessing_context": START_METHOD,
        "prefetch_factor": 2,
        "persistent_workers": True,
        # The loader draws a seed for its workers; from a generator of its own, so that the model's are not disturbed.
        "generator": torch.Generator(),
    }
