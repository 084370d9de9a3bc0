"""argparse as every command here uses it."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

from disco_ds.errors import CheckpointError, ConfigError, DataError

Arguments = ParamSpec("Arguments")


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError in place of leaving with a usage text; help keeps its line breaks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def command(prog: str) -> Callable[[Callable[Arguments, int]], Callable[Arguments, int]]:
    """A command's main whose exits are those of every command here: a mistake of the user's is one line and status 2,
    Ctrl-C is status 130, and a reader that has seen enough, as in ``disco-plan … | head -2``, ends it quietly.
    """

    def decorate(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
        @functools.wraps(main)
        def wrapped(*arguments: Arguments.args, **options: Arguments.kwargs) -> int:
            try:
                status = main(*arguments, **options)
                sys.stdout.flush()
            except (CheckpointError, ConfigError, DataError) as error:
                if os.environ.get("LOCAL_RANK", "0") == "0":  # once a machine: a file may be missing on one alone
                    print(f"{prog}: {error}", file=sys.stderr)
                return 2
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer goes there
                return 141  # as the shell has it of a program that SIGPIPE ended
            except KeyboardInterrupt:
                print(f"{prog}: interrupted", file=sys.stderr)
                return 130
            return status

        return wrapped

    return decorate


def completing(parser: Parser) -> Parser:
    """The same with ``--print-completion SHELL``, where shtab is installed (extra: completion)."""
    if importlib.util.find_spec("shtab") is not None:
        import shtab

        shtab.add_argument_to(parser, "--print-completion", help="print this command's completion for a shell")
    return parser
