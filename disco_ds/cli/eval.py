"""``disco-eval``: retrieval and zero-shot accuracy of a run or any open_clip model, on one process or torchrun's."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_ds.cli.flags import add_option, given_options
from disco_ds.cli.parser import Parser, command, completing
from disco_ds.config.options import OPTIONS
from disco_ds.config.read import read_run
from disco_ds.distributed import rank
from disco_ds.errors import ConfigError, DataError

if TYPE_CHECKING:  # torch and open_clip take seconds, --help does not
    from disco_ds.config.schema import RunConfig
    from disco_ds.evaluation.choose_model import Chosen
    from disco_ds.evaluation.folder import ClassFolder
    from disco_ds.evaluation.result import EvalResult

SHORT = {
    "evaluation.classes": ("--classes", "FILE|imagenet", "one a line (default: the run's; sub-folders)"),
    "evaluation.templates": ("--templates", "FILE|openai|simple", 'prompts with {}, one a line ("a photo of a {}.")'),
    "evaluation.batch": ("--batch", "N", "encoded at a time on each rank (default: the run's; 256)"),
    "data.workers": ("--workers", "N", "loader processes of each rank (default: the run's; 4 at most)"),
}
"""Options of a run that have a shorter name here, their metavar and their help."""


@command("disco-eval")
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; exit status 0: done, 2: the input is wrong, the message says where."""
    logging.basicConfig(level=logging.ERROR if rank() else logging.WARNING, format="disco-eval: %(message)s")
    return _evaluate(completing(_parser()).parse_args(argv))


def _parser() -> Parser:
    parser = Parser(
        prog="disco-eval",
        usage="disco-eval WHAT [--data.val SHARDS ... | --folder DIR] [options]",
        description="Measure a model on held-out data: retrieval (R@1, 5, 10, median and mean rank, both directions)\n"
        "and zero-shot accuracy. WHAT is a run's folder, a checkpoint, an exported file or folder, or the name\n"
        "of an open_clip model. A run brings its held-out data, classes and templates with it.",
        epilog="Fields of a run's data section are flags here too, such as --data.caption_key json:captions.\n"
        "On several GPUs or ranks: torchrun --nproc_per_node 8 -m disco_ds.cli.eval WHAT ...\n\nexamples:\n"
        "disco-eval runs/clip --data.val '/data/coco-val.tar' --data.caption_key json:captions --json\n"
        "disco-eval ViT-B-32 --pretrained clip.pt --folder imagenet/val --classes imagenet --templates openai",
    )
    add = parser.add_argument
    add("what", metavar="WHAT", help="run, checkpoint, export, or open_clip name")
    add("--pretrained", metavar="TAG|FILE", help="weights of an open_clip name")
    add("--model", metavar="NAME|JSON", help="model of a file that does not name its own")
    add("--checkpoint", metavar="step-…", help="of a run: the checkpoint to take (default: the newest)")
    add_option(parser, "data.val", OPTIONS["data.val"], metavar="SHARDS", help="tar, folder, glob, brace list, URL")
    add("--folder", type=Path, metavar="DIR", help="in place of shards: a sub-folder for each class")
    add("--no-retrieval", action="store_true", help="zero-shot only; images need no captions")
    for name, (flag, metavar, words) in SHORT.items():
        add(flag, dest=name, default=argparse.SUPPRESS, metavar=metavar, help=words)
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the weights (default: fp32)")
    add("--json", action="store_true", help="one JSON object, for scripts (docs/evaluation.md)")
    for name, option in OPTIONS.items():
        if name.startswith("data.") and name not in ("data.train", "data.weights", "data.val", *SHORT):
            add_option(parser, name, option, help=argparse.SUPPRESS)
    return parser


def _evaluate(arguments: argparse.Namespace) -> int:
    import torch

    from disco_ds.evaluation.choose_model import choose
    from disco_ds.evaluation.evaluate import check_evaluation
    from disco_ds.evaluation.folder import ClassFolder
    from disco_ds.evaluation.result import format_result
    from disco_ds.evaluation.zeroshot import load_classes
    from disco_ds.run.quiet import quiet_libraries

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported, whose classes are in checkpoints
    quiet_libraries()
    chosen = choose(
        arguments.what, pretrained=arguments.pretrained, model=arguments.model, checkpoint=arguments.checkpoint
    )
    if arguments.folder is not None and "data.val" in arguments:
        raise ConfigError("--folder and --data.val are both given; give one")
    folder = ClassFolder(arguments.folder) if arguments.folder is not None else None
    run = _run(arguments, chosen, folder)
    check_evaluation(run.evaluation)
    classes = load_classes(run.evaluation)
    if folder is not None:
        folder.labels(classes or [])  # raises what it would raise later
    retrieval = folder is None and not arguments.no_retrieval
    if not retrieval and classes is None:
        raise ConfigError("--no-retrieval leaves zero-shot accuracy, which needs --classes FILE")
    result = _measure(chosen, run, folder, retrieval, arguments.precision)
    if rank() > 0:
        return 0
    if arguments.json:
        content = {"what": chosen.label, "metrics": result.metrics, "per_class": result.per_class}
        print(json.dumps({"version": 1, **content, "notes": result.notes, "seconds": result.seconds}, indent=1))
    else:
        print(f"{chosen.label}\n{format_result(result)}")
    return 0


def _run(arguments: argparse.Namespace, chosen: Chosen, folder: ClassFolder | None) -> RunConfig:
    """The run whose data and evaluation sections count: the model's own, with the options in place of its."""
    from disco_ds.data.tools.pool import cores

    given: dict[str, Any] = {}
    if chosen.run_file is None:
        workers = min(4, max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        given = {"steps": 1, "data.train": "none", "data.workers": workers}
    if arguments.no_retrieval:
        given["data.caption_key"] = "cls"  # samples without one are dropped, and a label will do
    given |= given_options(arguments)
    if folder is not None:
        given.setdefault("evaluation.classes", folder.classes)
    run = read_run(chosen.run_file, given, {name: flag for name, (flag, _, _) in SHORT.items()})
    if folder is None and run.data.val is None:
        raise ConfigError("say what to measure on: --data.val SHARDS, or --folder DIR")
    return run


def _measure(chosen: Chosen, run: RunConfig, folder: ClassFolder | None, retrieval: bool, precision: str) -> EvalResult:
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from disco_ds.data.heldout import read_heldout
    from disco_ds.data.probe import probe
    from disco_ds.evaluation.evaluate import evaluate
    from disco_ds.evaluation.folder import read_folder
    from disco_ds.evaluation.retrieval import NonFiniteFeatures
    from disco_ds.evaluation.zeroshot import load_classes
    from disco_ds.model.preprocess import build_transform, preprocessing

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    share = {"rank": rank(), "world_size": world_size, "batch": run.evaluation.batch}
    model, tokenizer = chosen.build()
    transform, prepared = build_transform(model, training=False), preprocessing(model)
    if folder is None:
        probe(run.data, transform=transform, field="data.val")
        batches = read_heldout(run.data, transform=transform, tokenizer=tokenizer, **share)
    else:
        labels = folder.labels(load_classes(run.evaluation) or [])
        batches = read_folder(folder, labels, run.data, transform=transform, **share)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return evaluate(
            model,
            tqdm(batches, unit=" batches", leave=False, disable=True if rank() else None),
            tokenizer=tokenizer,
            config=run.evaluation,
            device=device,
            mean=prepared["mean"],
            std=prepared["std"],
            retrieval=retrieval,
        )
    except NonFiniteFeatures as error:
        raise DataError(str(error)) from None
    finally:
        if world_size > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
