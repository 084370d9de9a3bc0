"""What the process that ranks are forked from imports, once for all of them (``ranks.py``)."""

from __future__ import annotations

import gc
import importlib
import os
import resource

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compilers, which its import would start
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for _name in (
    "disco_ds.run.train",
    "disco_ds.cli.train",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.original_muon",  # compiles a function: torch's inductor, three seconds
    "open_clip",
    "matplotlib.pyplot",
    "jinja2",
    "pytest",
):
    importlib.import_module(_name)
importlib.import_module("torch").set_num_threads(1)
gc.collect()
gc.freeze()  # ZeRO 3 collects garbage for each engine: half a second where all modules are looked through
