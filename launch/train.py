"""Train a CLIP-like model.

    deepspeed launch/train.py --ds_config ds_configs/zero2.json
    torchrun --nproc_per_node 2 launch/train.py --ds_config ds_configs/zero2.json
    python launch/train.py

With no further argument it trains the embedded default (disco_ds/config/demo.yaml); ``--help`` lists every option.
"""

from __future__ import annotations

import sys
from pathlib import Path

from disco_ds.config import read as options
from disco_ds.distributed import fail
from disco_ds.errors import CheckpointError, ConfigError, DataError

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Read the options, then prepare and train; the user's mistakes end in one line and status 2."""
    import disco_ds
    from disco_ds.engine.deepspeed_engine import prepare_environment, rank

    prepare_environment()
    demo = Path(disco_ds.__file__).parent / "config" / "demo.yaml"
    try:
        config, launch = options.parse(sys.argv[1:], prog="launch/train.py", demo=demo)
    except ConfigError as error:
        fail(error)

    from disco_ds.engine.deepspeed_engine import start_distributed
    from disco_ds.run.quiet import quiet_libraries

    quiet_libraries()
    device = start_distributed(config.timeout_minutes)
    from disco_ds.run.prepare import prepare, start_logging
    from disco_ds.run.train import train
    from disco_ds.run.watchdog import Watchdog

    start_logging(rank())
    watchdog, run = Watchdog.of_process_group(config.timeout_minutes), None
    ds_config = launch.ds_config or ROOT / "ds_configs" / "zero2.json"
    try:
        run = prepare(config, ds_config, device, watchdog, plan=launch.plan)
        train(run)
    except Exception as error:
        if run is None and isinstance(error, (ConfigError, DataError, CheckpointError)):
            watchdog.tell(error)
            watchdog.close()
            fail(error)
        # this rank alone may have failed: it says who and where it is, then what
        where = "while it started" if run is None else f"after step {run.state.step}"
        print(f"[rank {rank()}] failed {where}: {error}", file=sys.stderr, flush=True)
        others = watchdog.blame(error)
        if others:
            print(f"[rank {rank()}] {others}", file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    main()
