"""argparse as every command here uses it."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any, NoReturn

from disco_ds.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError in place of leaving with a usage text; help keeps its line breaks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def completing(parser: Parser) -> Parser:
    """The same with ``--print-completion SHELL``, where shtab is installed (extra: completion)."""
    if importlib.util.find_spec("shtab") is not None:
        import shtab

        shtab.add_argument_to(parser, "--print-completion", help="print this command's completion for a shell")
    return parser
