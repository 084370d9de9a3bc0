"""``disco-data show``: a picture of what the model will see."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disco_ds.cli.data.options import EPILOG, Preparation, Reading, add_shards, positive, preparation, reading
from disco_ds.cli.parser import Parser
from disco_ds.data.decode import Decoder, Pair
from disco_ds.data.lanes import Lane, Slices, Tally
from disco_ds.data.tools.sheet import Tile, contact_sheet
from disco_ds.data.tools.tokens import TokenCounter
from disco_ds.errors import ConfigError, DataError

log = logging.getLogger("disco_ds.data")

AHEAD = 4
"""Samples read for each one that is shown, so that neighbours in a shard do not stand together."""


def add(commands: Any) -> None:
    """Add the command to ``disco-data``."""
    parser: Parser = commands.add_parser(
        "show",
        help="draw some images as the model gets them, with captions and token counts",
        description="Draw a contact sheet: images from all over the shards after the model's transform, at\n"
        "its resolution, with captions beneath, the number of their tokens, and keys.",
        epilog="examples:\ndisco-data show '/data/{00000..00099}.tar' --model ViT-B-32 --out sheet.png\n"
        "disco-data show --run runs/clip/config.yaml --evaluation --count 36 --out sheet.png\n\n" + EPILOG,
    )
    add_shards(parser, workers=False)
    add = parser.add_argument
    add(
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="picture to write; its ending decides the format (.png, .jpg, …)",
    )
    add("--count", type=positive, default=16, metavar="N", help="images (default: %(default)s)")
    add("--evaluation", action="store_true", help="the transform of evaluation, and the run's held-out data")
    add("--seed", type=int, default=0, metavar="N", help="which samples, and their augmentation (default: %(default)s)")
    add("--font", metavar="FILE", type=Path, help="font to try before the installed ones")
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw the sheet."""
    read = reading(arguments)
    if not read.has_model:
        raise ConfigError("name the model whose transform and tokenizer are used: --model NAME or --run FILE")
    if arguments.font is not None and not arguments.font.is_file():
        raise ConfigError(f"--font {arguments.font}: there is no such file; expected a .ttf, .otf or .ttc file")
    prepared = preparation(read.run, training=not arguments.evaluation)
    tally = Tally()
    pairs = pick(read, prepared, arguments.count, arguments.seed, tally, arguments.evaluation)
    tiles = [_tile(pair, prepared) for pair in pairs]
    font = str(arguments.font) if arguments.font else None
    sheet, missing = contact_sheet(tiles, prepared.mean, prepared.std, font)
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(arguments.out)
    except (OSError, ValueError) as error:
        raise DataError(f"--out {arguments.out} cannot be written: {error}") from error
    cut = sum(tile.tokens > prepared.context for tile in tiles if tile.tokens is not None)
    size = f"{tiles[0].image.shape[2]} x {tiles[0].image.shape[1]}"
    print(f"{arguments.out}: {len(tiles)} images of {size} pixels, {cut} captions cut to {prepared.context} tokens")
    for note in tally.notes:
        log.warning("left out: %s", note)
    if missing:
        some = " ".join(sorted(missing)[:8])
        log.warning(
            "no installed font has %d of the characters (%s): they are boxes in the picture. Install one, such as "
            "Debian's fonts-noto-core, fonts-noto-cjk or fonts-symbola, or give --font FILE",
            len(missing),
            some,
        )
    return 0


def _tile(pair: Pair, prepared: Preparation) -> Tile:
    tokens = TokenCounter(prepared.tokenizer, prepared.context)(pair.caption)
    return Tile(pair.image, pair.caption, pair.key, tokens, prepared.context)


def pick(
    read: Reading, prepared: Preparation, count: int, seed: int, tally: Tally, evaluation: bool = False
) -> Iterator[Pair]:
    """One sample from each of ``count`` places of the shards, in a seeded order; of the held-out ones for evaluation.

    Raises:
        DataError: there is no good sample.
    """
    slices = [Slices(read.val if evaluation and read.val else read.train, count, seed)]
    decoder = Decoder(read.run.data, prepared.transform)
    seen: set[str] = set()
    nothing: DataError | None = None
    for number in range(count):
        lane = Lane(number, slices, None, seed=seed, block_size=AHEAD, decoder=decoder, tally=tally)
        try:
            for _ in range(AHEAD):  # in small data lanes come to the same sample
                pair = lane.next()
                if pair.key not in seen:
                    seen.add(pair.key)
                    yield pair
                    break
        except DataError as error:  # fewer samples than places: this one has none
            nothing = error
        finally:
            lane.close()
    if not seen and nothing is not None:
        raise nothing
