"""Train a CLIP-like model: the same as ``disco-train``, as a file for launchers.

deepspeed launch/train.py --ds_config ds_configs/zero2.json
torchrun --nproc_per_node 2 launch/train.py --ds_config ds_configs/zero2.json
python launch/train.py --help
"""

import sys

from disco_ds.cli.train import main

if __name__ == "__main__":
    sys.exit(main(prog="launch/train.py"))
