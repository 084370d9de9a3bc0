"""``disco-eval``: retrieval and zero-shot accuracy of a run or any open_clip model, on one process or torchrun's."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disco_ds.cli.parser import Parser, completing, to_a_pipe
from disco_ds.config.read import leaf_fields, parse
from disco_ds.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:  # torch and open_clip take seconds, --help does not
    from disco_ds.config.schema import RunConfig
    from disco_ds.evaluation.choose_model import Chosen
    from disco_ds.evaluation.folder import ClassFolder
    from disco_ds.evaluation.result import EvalResult

SHORT = {
    "classes": "evaluation.classes",
    "templates": "evaluation.templates",
    "batch": "evaluation.batch",
    "workers": "data.workers",
}
"""Options that are fields of a run under a shorter name."""


@to_a_pipe
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; exit status 0: done, 2: the input is wrong, the message says where."""
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if first else logging.ERROR, format="disco-eval: %(message)s")
    try:
        return _evaluate(completing(_parser()).parse_args(argv))
    except (CheckpointError, ConfigError, DataError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # a file may be missing on one machine alone
            print(f"disco-eval: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("disco-eval: interrupted", file=sys.stderr)
        return 130


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
    add("--data.val", nargs="+", action="extend", metavar="SHARDS", help="tar, folder, glob, brace list, URL")
    add("--folder", type=Path, metavar="DIR", help="in place of shards: a sub-folder for each class")
    add("--classes", metavar="FILE|imagenet", help="one a line (default: the run's; sub-folders)")
    add("--templates", metavar="FILE|openai|simple", help='prompts with {}, one a line ("a photo of a {}.")')
    add("--no-retrieval", action="store_true", help="zero-shot only; images need no captions")
    add("--confusion", type=Path, metavar="FILE.png", help="picture: which class is ranked first for which")
    add("--batch", metavar="N", help="encoded at a time on each rank (default: the run's; 256)")
    add("--workers", metavar="N", help="loader processes of each rank (default: the run's; 4 at most)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the weights (default: fp32)")
    add("--json", action="store_true", help="one JSON object, for scripts (docs/evaluation.md)")
    for name, field in leaf_fields():
        if name.startswith("data.") and name not in ("data.val", "data.train", "data.weights"):
            extra: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
            add(f"--{name}", dest=name, default=None, help=argparse.SUPPRESS, **extra)
    return parser


def _evaluate(arguments: argparse.Namespace) -> int:
    import torch

    from disco_ds.evaluation import confusion
    from disco_ds.evaluation.choose_model import choose
    from disco_ds.evaluation.evaluate import check_evaluation, format_result
    from disco_ds.evaluation.folder import find_classes
    from disco_ds.evaluation.zeroshot import load_classes
    from disco_ds.run.quiet import quiet_libraries

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported, whose classes are in checkpoints
    quiet_libraries()
    chosen = choose(
        arguments.what, pretrained=arguments.pretrained, model=arguments.model, checkpoint=arguments.checkpoint
    )
    if arguments.folder is not None and getattr(arguments, "data.val") is not None:
        raise ConfigError("--folder and --data.val are both given; give one")
    folder = find_classes(arguments.folder) if arguments.folder is not None else None
    run = _run(arguments, chosen, folder)
    check_evaluation(run.evaluation)
    classes = load_classes(run.evaluation)
    if folder is not None:
        folder.labels(classes or [])  # raises what it would raise later
    if arguments.confusion is not None:
        if classes is None:
            raise ConfigError("--confusion needs classes: give --classes FILE")
        confusion.check_drawing()
    retrieval = folder is None and not arguments.no_retrieval
    if not retrieval and classes is None:
        raise ConfigError("--no-retrieval leaves zero-shot accuracy, which needs --classes FILE")
    result, first = _measure(chosen, run, folder, retrieval, arguments)
    if not first:
        return 0
    if arguments.confusion is not None and classes is not None and result.confusion is not None:
        confusion.draw_confusion(result.confusion, classes, arguments.confusion, chosen.label)
    if arguments.json:
        told = {"what": chosen.label, "metrics": result.metrics, "per_class": result.per_class, "notes": result.notes}
        print(json.dumps({"version": 1, **told, "seconds": result.seconds}, indent=1))
        return 0
    print(f"{chosen.label}\n{format_result(result)}")
    if arguments.confusion is not None:
        print(f"  picture: {arguments.confusion}")
    return 0


def _run(arguments: argparse.Namespace, chosen: Chosen, folder: ClassFolder | None) -> RunConfig:
    """The data and evaluation sections to go by: the run's own, with the options on top."""
    from disco_ds.data.tools.pool import cores

    given = vars(arguments)
    words = ["--config", str(chosen.run_file)] if chosen.run_file is not None else ["--steps", "1"]
    words += [] if chosen.run_file is not None else ["--data.train", "none"]
    fields = {name: given[short] for short, name in SHORT.items()}
    fields.update({name: value for name, value in given.items() if name.startswith("data.") and value is not None})
    if fields.get("data.workers") is None and chosen.run_file is None:
        fields["data.workers"] = min(4, max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if arguments.no_retrieval and fields.get("data.caption_key") is None:
        fields["data.caption_key"] = "cls"  # samples without one are dropped, and a label will do
    for name, value in fields.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    try:
        run, _ = parse(words, prog="disco-eval", demo=Path())
    except ConfigError as error:
        message = str(error).replace("--config ", "")
        for short, name in SHORT.items():
            message = message.replace(f"--{name}", f"--{short}")
        raise ConfigError(message) from None
    if folder is not None:
        names = run.evaluation.classes if arguments.classes is not None else folder.names
        return run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"classes": names})})
    if run.data.val is None:
        raise ConfigError("say what to measure on: --data.val SHARDS, or --folder DIR")
    return run


def _measure(
    chosen: Chosen, run: RunConfig, folder: ClassFolder | None, retrieval: bool, arguments: argparse.Namespace
) -> tuple[EvalResult, bool]:
    """The result, and whether this is the rank that tells it."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from disco_ds.data.heldout import probe
    from disco_ds.evaluation.evaluate import evaluate
    from disco_ds.evaluation.retrieval import NonFiniteFeatures
    from disco_ds.model.build import build_transform, preprocessing

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model, tokenizer = chosen.build()
    transform, prepared = build_transform(model, training=False), preprocessing(model)
    if folder is None:
        probe(run.data, transform=transform, field="data.val")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    model.to(device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        batches = _batches(run, folder, transform, tokenizer, rank, world_size)
        result = evaluate(
            model,
            tqdm(batches, unit=" batches", leave=False, disable=True if rank else None),
            tokenizer=tokenizer,
            config=run.evaluation,
            rank=rank,
            world_size=world_size,
            device=device,
            mean=prepared["mean"],
            std=prepared["std"],
            retrieval=retrieval,
            confusion=arguments.confusion is not None,
        )
    except NonFiniteFeatures as error:
        raise DataError(str(error)) from None
    finally:
        if world_size > 1:
            dist.destroy_process_group()
    return result, rank == 0


def _batches(
    run: RunConfig, folder: ClassFolder | None, transform: Any, tokenizer: Any, rank: int, world_size: int
) -> Iterator[Any]:
    from PIL import ImageColor

    from disco_ds.data.decode import Pictures
    from disco_ds.data.heldout import read_heldout
    from disco_ds.evaluation.folder import read_folder
    from disco_ds.evaluation.zeroshot import load_classes

    share = {"rank": rank, "world_size": world_size, "batch": run.evaluation.batch}
    if folder is None:
        return read_heldout(run.data, transform=transform, tokenizer=tokenizer, **share)
    pictures = Pictures(run.data.max_pixels, background=ImageColor.getrgb(run.data.background)[:3])
    labels = folder.labels(load_classes(run.evaluation) or folder.names)
    return read_folder(folder, labels, transform=transform, pictures=pictures, workers=run.data.workers, **share)


if __name__ == "__main__":
    sys.exit(main())
