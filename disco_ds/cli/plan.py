"""``disco-plan``: the memory of a training step, and the largest batch, before anyone rents a GPU."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from disco_ds.cli.parser import Parser, command, completing
from disco_ds.errors import ConfigError
from disco_ds.loss.memory import KINDS
from disco_ds.planner.coefficients import OPTIMIZER_BYTES
from disco_ds.planner.devices import DEVICES, GIB, device_of
from disco_ds.planner.from_ds_config import choices, planned_buckets
from disco_ds.planner.models import ModelSource
from disco_ds.planner.search import Plan, Planner, Request, cuts
from disco_ds.planner.text import as_json, settings_table, text_report

FIELDS = {field.name: field.default for field in fields(Request)}
"""Fields of Request that options fill, and their defaults."""


@command("disco-plan")
def main(argv: Sequence[str] | None = None) -> int:
    """Answer; exit status 0: it fits, 1: it does not, 2: the question has to be changed, the message says where."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["trace"]:
        from disco_ds.cli.trace import run_trace

        return run_trace(words[1:])
    return _answer(completing(_parser()).parse_args(words))


def _parser() -> Parser:
    parser = Parser(
        prog="disco-plan",
        usage="disco-plan --gpus N (--mem SIZE | --gpu NAME) [options]",
        description="The largest exact contrastive batch that fits, or the fastest settings for a given batch.\n"
        "Sizes: --mem 40G is a device sold as 40 GB; everything else is in GiB (2^30 bytes).\n"
        "In parentheses: the default.",
        epilog="disco-plan --gpus 64 --mem 40G\n"
        "disco-plan --gpus 8 --gpu H100 --model ViT-L-14 --global-batch 65536 --compare\n"
        "disco-plan trace ViT-B-32 --precision amp      what a model's activations take (disco-plan trace --help)\n\n"
        "exit status: 0 fits, 1 does not fit (and says what does), 2 the input is wrong",
    )

    def add(flag: str, text: str, field: str | None = None, **options: Any) -> None:
        """An option; a field of Request is absent unless it is given, and has its default in the help."""
        name = field or flag[2:].replace("-", "_")
        default = FIELDS.get(name, MISSING)
        if default is not MISSING:
            options |= {"dest": name, "default": argparse.SUPPRESS}
            text += "" if default is None else f" ({default})"
        parser.add_argument(flag, help=text, **options)

    add("--gpus", "number of GPUs (1)", type=count, default=1, metavar="N")
    add("--mem", "of one: 40G as sold, 39.4GiB exactly that much", metavar="SIZE")
    add("--gpu", f"kind of GPU instead: {', '.join(DEVICES)}", metavar="NAME")
    add("--model", "open_clip name, demo, or a JSON (ViT-B-32)", default="ViT-B-32", metavar="MODEL")
    add("--global-batch", "pairs a step on all GPUs; without it, the largest", type=count, metavar="B")
    add("--per-gpu-batch", "pairs a step on one GPU: predict that case", type=count, metavar="b")
    add("--micro-batch", "pairs at a time; below b: cached gradients, exact", type=count, metavar="m")
    add("--zero", "DeepSpeed ZeRO: 0, 1, 2, 3 or auto", type=_number, metavar="STAGE")
    add("--precision", "bf16, amp (bf16 autocast) or fp32", choices=["bf16", "amp", "fp32"], metavar="P")
    add("--checkpointing", "none, full, every:K, ops, offload or auto", type=_policy, metavar="HOW")
    add("--loss", ", ".join(KINDS), choices=KINDS, metavar="L")
    add("--optimizer", " or ".join(OPTIMIZER_BYTES), choices=list(OPTIMIZER_BYTES), metavar="O")
    add("--offload", "to the host: none, optimizer or all", choices=["none", "optimizer", "all"], metavar="WHAT")
    add("--attention", "flash, or math as torch before 2.0", choices=["flash", "math"], metavar="A")
    add("--image-size", "where it differs from the model's own", type=count, metavar="PX")
    add("--context-length", "where it differs from the model's own", type=count, metavar="T")
    add("--ds-config", "takes stage, buckets, batch, precision, offload", metavar="FILE")
    add("--frag", "held over allocated activations", "fragmentation", type=_factor, metavar="F")
    add("--reserve", "GiB to leave free", "reserve_bytes", type=_gib, metavar="GIB")
    add("--min-micro-batch", "smallest that feeds a GPU", type=count, metavar="m")
    add("--bandwidth", "of collectives, to rank by; assumed", "bandwidth_gb_s", type=_factor, metavar="GB/s")
    add("--compare", "ZeRO x checkpointing x loss in one table", action="store_true")
    add("--plot", "picture: memory against batch, and batch against GPUs", type=Path, metavar="FILE")
    add("--json", "the answer for programs (docs/planner.md)", action="store_true")
    add("--write", "ds_config.json and run.yaml for launch/train.py", type=Path, metavar="DIR")
    add("--data", "data.train of the run.yaml (demo)", metavar="SHARDS")
    add("--samples", "length of the run.yaml in samples", type=count, metavar="N")
    return parser


def count(text: str) -> int:
    """A positive whole number on the command line."""
    if not re.fullmatch(r"\d[\d_]*", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text  # Request says what it takes


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return value


def _gib(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:Gi?B?)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a size in GiB such as 2 or 1.5, found {text!r}")
    return int(float(match[1]) * GIB)


def _policy(text: str) -> str:
    if not re.fullmatch(r"none|full|every:[1-9]\d*|ops|offload|auto", text):
        raise argparse.ArgumentTypeError(f"expected none, full, every:K, ops, offload or auto, found {text!r}")
    return text


def build_request(arguments: argparse.Namespace, source: ModelSource) -> Request:
    """The request that the options and the ds_config make together.

    Raises:
        ConfigError: they contradict each other, or something is missing.
    """
    device = device_of(arguments.mem, arguments.gpu)
    asked = {name: value for name, value in vars(arguments).items() if name in FIELDS and name != "gpu"}
    content: dict[str, Any] = {}
    if arguments.ds_config is not None:
        from disco_ds.engine.ds_schema import read_ds_config  # imports pydantic

        content = read_ds_config(arguments.ds_config, "--ds-config", deepspeed=False)
        for name, value in choices(content, arguments.gpus).items():
            if asked.setdefault(name, value) != value:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is {asked[name]} but --ds-config {arguments.ds_config} says {value}")
    request = Request(gpu=device, **asked)
    if arguments.ds_config is not None:
        model = source.of(request.setup(0, "none" if request.checkpointing == "auto" else request.checkpointing))
        request = replace(request, buckets=planned_buckets(content, model))
    return request


def _answer(arguments: argparse.Namespace) -> int:
    sizes = {"image_size": arguments.image_size, "context_length": arguments.context_length}
    source = ModelSource(arguments.model, changes=sizes, check=True)
    request = build_request(arguments, source)
    planner = Planner(source)
    plan = planner.best(request)
    near = None if plan.fits else nearest_fitting(planner, request)
    notes: list[str] = []
    if arguments.write is not None and not plan.fits:
        notes.append(f"--write {arguments.write}: nothing was written, since this does not fit; ask for what fits")
    elif arguments.write is not None:
        from disco_ds.planner.write import write_plan

        ds_config, run = write_plan(arguments.write, plan, source, arguments.data, arguments.samples)
        start = f"deepspeed launch/train.py --config {run} --ds_config {ds_config}"
        notes.append(f"wrote {ds_config} and {run}; start with: {start}")
    if arguments.plot is not None:
        from disco_ds.planner.plot import plot

        notes.append(f"picture: {plot(planner, plan, arguments.model, arguments.plot)}")
    if arguments.json:
        print(json.dumps(as_json(plan, arguments.model, near, notes), indent=2))
    else:
        print(text_report(planner, plan, arguments.model, near))
        if arguments.compare:
            print("\n" + settings_table(planner, request))
        for note in notes:
            print(note)
    return 0 if plan.fits else 1


def nearest_fitting(planner: Planner, request: Request) -> Plan | None:
    """What fits in place of a request that does not: other settings first, then a smaller batch; None if nothing."""
    open_settings = replace(request, zero="auto", checkpointing="auto", offload="none")
    batch = cuts(request)[0].per_rank if request.has_batch else None
    for attempt in (
        open_settings,
        replace(open_settings, global_batch=None, per_gpu_batch=batch, micro_batch=None, accumulation=None),
        request.largest(accumulation=None),
        open_settings.largest(accumulation=None),
        open_settings.largest(accumulation=None, offload="all"),
    ):
        try:
            plan = planner.best(attempt)
        except ConfigError:
            continue
        if plan.fits:
            return plan
    return None


if __name__ == "__main__":
    sys.exit(main())
