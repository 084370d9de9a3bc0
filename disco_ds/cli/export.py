"""``disco-export``: the model of a run as a file or folder that open_clip loads. One process, no GPU."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from disco_ds.cli.parser import Parser, command, completing

GIB = 2**30


@command("disco-export")
def main(argv: Sequence[str] | None = None) -> int:
    """Export; exit status 0: written, 2: the input is wrong, the message says where."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported, whose classes are in the files
    logging.basicConfig(level=logging.WARNING, format="disco-export: %(message)s")
    return _export(argv)


def _parser() -> Parser:
    parser = Parser(
        prog="disco-export",
        description="Write the model of a run for others to load, from a checkpoint of any ZeRO stage and number of\n"
        "ranks; the newest that verifies, unless one is named.\n\n"
        "  open_clip    .pt, a state dict for open_clip.create_model_and_transforms(NAME, pretrained=FILE)\n"
        "  safetensors  the same as .safetensors\n"
        "  hf           a folder with configuration and preprocessing: 'local-dir:FOLDER' in open_clip,\n"
        "               and what the Hugging Face hub takes as it is",
        epilog="examples:\ndisco-export runs/clip --to hf --out clip-hf\n"
        "disco-export runs/clip/checkpoints/step-00000100 --to safetensors --precision bf16",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or a checkpoint")
    parser.add_argument("--to", choices=["open_clip", "safetensors", "hf"], required=True, help="the form")
    parser.add_argument("--out", type=Path, metavar="PATH", help="file or folder (default: export/… in the run)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the weights (default: fp32)")
    parser.add_argument("--checkpoint", metavar="step-…", help="the checkpoint to take (default: the newest)")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    return parser


def _export(argv: Sequence[str] | None) -> int:
    arguments = completing(_parser()).parse_args(argv)
    from disco_ds.checkpoint.saved import find_saved
    from disco_ds.model.export import export
    from disco_ds.run.quiet import quiet_libraries

    quiet_libraries()
    saved = find_saved(arguments.run, arguments.checkpoint)
    made = export(saved, arguments.to, arguments.out, precision=arguments.precision, force=arguments.force)
    if arguments.json:
        told = {"checkpoint": str(saved.path), "step": saved.step, "path": str(made.path), "bytes": made.bytes}
        print(json.dumps({"version": 1, **told, "usage": made.usage, "notes": made.notes}, indent=1))
        return 0
    print(f"{made.path}: {saved.model.name} after step {saved.step:,}, {arguments.precision}, {_size(made.bytes)}")
    for line in made.usage:
        print(f"  {line}")
    for note in made.notes:
        print(f"  note: {note}")
    return 0


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
