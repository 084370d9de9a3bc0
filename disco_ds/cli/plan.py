"""``disco-plan``: the memory of a training step, and the largest batch, before anyone rents a GPU."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disco_ds.cli.parser import Parser, completing, to_a_pipe
from disco_ds.errors import ConfigError
from disco_ds.planner import from_ds_config
from disco_ds.planner.devices import DEVICES, GIB, device_named, device_with
from disco_ds.planner.memory import OPTIMIZER_BYTES
from disco_ds.planner.models import ModelSource
from disco_ds.planner.search import Plan, Planner, Request, changed, stages, with_accumulation
from disco_ds.planner.text import as_json, compare, text_report


@to_a_pipe
def main(argv: Sequence[str] | None = None) -> int:
    """Answer; exit status 0: it fits, 1: it does not, 2: the question has to be changed, the message says where."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["trace"]:
            from disco_ds.cli.trace import run_trace

            return run_trace(words[1:])
        return _answer(completing(_parser()).parse_args(words))
    except ConfigError as error:
        print(f"disco-plan: {error}", file=sys.stderr)
        return 2


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
    add = parser.add_argument
    add("--gpus", type=count, default=1, metavar="N", help="number of GPUs (1)")
    add("--mem", metavar="SIZE", help="of one: 40G as sold, 39.4GiB exactly that much")
    add("--gpu", metavar="NAME", help=f"kind of GPU instead: {', '.join(DEVICES)}")
    add("--model", default="ViT-B-32", help="open_clip name, demo, or a JSON (ViT-B-32)")
    add("--global-batch", type=count, metavar="B", help="pairs a step on all GPUs; without it, the largest")
    add("--per-gpu-batch", type=count, metavar="b", help="pairs a step on one GPU: predict that case")
    add("--micro-batch", type=count, metavar="m", help="pairs at a time; below b: cached gradients, exact")
    add("--zero", choices=["0", "1", "2", "3", "auto"], default=None, metavar="STAGE",
        help="DeepSpeed ZeRO: 0, 1, 2, 3 or auto (auto)")  # fmt: skip
    add("--precision", choices=["bf16", "amp", "fp32"], metavar="P", help="bf16, amp (bf16 autocast) or fp32 (bf16)")
    add("--checkpointing", type=_policy, default="auto", metavar="HOW",
        help="none, full, every:K, ops, offload or auto (auto)")  # fmt: skip
    add("--loss", choices=["one_block", "disco", "open_clip", "clip", "sigmoid"], default="one_block", metavar="L",
        help="one_block, disco, open_clip, clip, sigmoid (one_block)")  # fmt: skip
    add("--optimizer", choices=list(OPTIMIZER_BYTES), default="adamw", metavar="O",
        help=f"{' or '.join(OPTIMIZER_BYTES)} (adamw)")  # fmt: skip
    add("--offload", choices=["none", "optimizer", "all"], metavar="WHAT",
        help="to the host: none, optimizer or all (none)")  # fmt: skip
    add("--attention", choices=["flash", "math"], default="flash", metavar="A",
        help="flash, or math as torch before 2.0 (flash)")  # fmt: skip
    add("--image-size", type=count, metavar="PX", help="where it differs from the model's own")
    add("--context-length", type=count, metavar="T", help="where it differs from the model's own")
    add("--ds-config", metavar="FILE", help="takes stage, buckets, batch, precision, offload")
    add("--frag", type=_factor, default=1.10, metavar="F", help="held over allocated activations (1.10)")
    add("--reserve", type=_gib, default=0, metavar="GIB", help="GiB to leave free (0)")
    add("--min-micro-batch", type=count, default=64, metavar="m", help="smallest that feeds a GPU (64)")
    add("--bandwidth", type=_factor, default=50.0, metavar="GB/s", help="of collectives, to rank by (50, assumed)")
    add("--compare", action="store_true", help="ZeRO x checkpointing x loss in one table")
    add("--plot", type=Path, metavar="FILE", help="picture: memory against batch, and batch against GPUs")
    add("--json", action="store_true", help="the answer for programs (docs/planner.md)")
    add("--write", type=Path, metavar="DIR", help="ds_config.json and run.yaml for launch/train.py")
    add("--data", metavar="SHARDS", help="data.train of the run.yaml (demo)")
    add("--samples", type=count, metavar="N", help="length of the run.yaml in samples")
    return parser


def count(text: str) -> int:
    """A positive whole number on the command line."""
    if not re.fullmatch(r"\d[\d_]*", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, found {text!r}")
    return int(text)


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
    if (arguments.mem is None) == (arguments.gpu is None):
        found = "both are" if arguments.mem else "neither is"
        raise ConfigError(f"give --mem (40G) or --gpu (A100-40G): {found} given")
    device = device_with(arguments.mem) if arguments.mem else device_named(arguments.gpu)
    given: dict[str, Any] = {
        "global_batch": arguments.global_batch,
        "micro_batch": arguments.micro_batch,
        "zero": arguments.zero if arguments.zero in (None, "auto") else int(arguments.zero),
        "precision": arguments.precision,
        "offload": arguments.offload,
    }
    content = from_ds_config.read(arguments.ds_config) if arguments.ds_config else None
    for name, value in (from_ds_config.choices(content, arguments.gpus) if content is not None else {}).items():
        if given[name] not in (None, value):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {given[name]} but --ds-config {arguments.ds_config} says {value}")
        given[name] = value
    request = Request(
        gpus=arguments.gpus, device=device, per_gpu_batch=arguments.per_gpu_batch,
        optimizer=arguments.optimizer, checkpointing=arguments.checkpointing, loss=arguments.loss,
        attention=arguments.attention,
        fragmentation=arguments.frag, reserve_bytes=arguments.reserve, min_micro_batch=arguments.min_micro_batch,
        bandwidth_gb_s=arguments.bandwidth, **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    if arguments.frag < 1:
        raise ConfigError(f"--frag {arguments.frag}: a process never holds less than is allocated; expected at least 1")
    if request.limit_bytes <= 0:
        raise ConfigError(f"--reserve {arguments.reserve / GIB:g}: nothing of {device.usable_gib:.2f} GiB is left")
    stages(request)  # raises where stage and offload do not go together
    if content is not None:
        request = with_accumulation(request, content)
        policy = "none" if request.checkpointing == "auto" else request.checkpointing
        model = source.get(request.precision, policy, request.attention)
        request = changed(request, buckets=from_ds_config.buckets(content, model))
    return request


def _answer(arguments: argparse.Namespace) -> int:
    sizes = {"image_size": arguments.image_size, "context_length": arguments.context_length}
    source = ModelSource(arguments.model, changes=sizes, check=True)
    request = build_request(arguments, source)
    planner = Planner(source)
    plan = planner.best(request)
    near = None if plan.fits else nearest_fitting(planner, request)
    notes: list[str] = []
    if arguments.write is not None:
        notes.append(_write(arguments, source, plan))
    if arguments.plot is not None:
        from disco_ds.planner.plot import plot

        notes.append(f"picture: {plot(planner, plan, arguments.model, arguments.plot)}")
    if arguments.json:
        print(json.dumps(as_json(plan, arguments.model, near, notes), indent=2))
    else:
        print(text_report(planner, plan, arguments.model, near))
        if arguments.compare:
            print("\n" + compare(planner, request))
        for note in notes:
            print(note)
    return 0 if plan.fits else 1


def _write(arguments: argparse.Namespace, source: ModelSource, plan: Plan) -> str:
    """``--write``: the files, and what there is to say of them."""
    if not plan.fits:
        return f"--write {arguments.write}: nothing was written, since this does not fit; ask for what fits instead"
    from disco_ds.planner.write import write_plan

    paths = write_plan(arguments.write, plan, source, arguments.data, arguments.samples)
    start = f"deepspeed launch/train.py --config {paths[1]} --ds_config {paths[0]}"
    return f"wrote {paths[0]} and {paths[1]}; start with: {start}"


def nearest_fitting(planner: Planner, request: Request) -> Plan | None:
    """What fits in place of a request that does not: other settings first, then a smaller batch; None if nothing."""
    open_settings = changed(request, zero="auto", checkpointing="auto", offload="none")
    smaller = {"global_batch": None, "per_gpu_batch": None, "accumulation": None}
    for attempt in (
        open_settings,
        changed(open_settings, micro_batch=None, accumulation=None),
        changed(request, **smaller),
        changed(open_settings, **smaller),
        changed(open_settings, **smaller, offload="all"),
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
