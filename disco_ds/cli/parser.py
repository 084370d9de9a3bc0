"""argparse as every command here uses it."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

from disco_ds.errors import ConfigError

Arguments = ParamSpec("Arguments")


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError in place of leaving with a usage text; help keeps its line breaks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def to_a_pipe(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """A command's main that ends quietly when its reader does, as in ``disco-plan … | head -2``."""

    @functools.wraps(main)
    def wrapped(*arguments: Arguments.args, **options: Arguments.kwargs) -> int:
        try:
            status = main(*arguments, **options)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer goes there
            return 141  # as the shell has it of a program that SIGPIPE ended
        return status

    return wrapped


def completing(parser: Parser) -> Parser:
    """The same with ``--print-completion SHELL``, where shtab is installed (extra: completion)."""
    if importlib.util.find_spec("shtab") is not None:
        import shtab

        shtab.add_argument_to(parser, "--print-completion", help="print this command's completion for a shell")
    return parser
