"""The type of a subcommand: its help, its arguments, and the function that runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ...core.errors import UserError
from ...core.json_types import JsonObject


@dataclass(frozen=True)
class Argument:
    """One argument, as argparse takes it."""

    name: str
    help: str
    settings: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    name: str
    summary: str
    description: str
    examples: tuple[tuple[str, str], ...]  # command, what it does
    arguments: tuple[Argument, ...]
    run: Callable[[argparse.Namespace], int]  # arguments, with the whole command as it was `typed` -> exit code
    only_prints: bool = False  # so that output which cannot be written is an error

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The parsed words. Raises `UserError` for what the command does not take."""
        return self._parser().parse_intermixed_args(arguments)

    def help(self) -> str:
        """What `--help` prints."""
        return self._parser().format_help()

    def _parser(self) -> argparse.ArgumentParser:
        width = max((len(command) for command, _ in self.examples), default=0)
        examples = "\n".join(f"  {command:<{width}}  {what}".rstrip() for command, what in self.examples)
        parser = _Parser(
            prog=f"draftsmith {self.name}",
            description=self.description,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for argument in self.arguments:
            parser.add_argument(argument.name, help=argument.help, **argument.settings)
        return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        settings = "settings are key=value (dry_run=true); " if "key=value" in self.format_usage() else ""
        raise UserError(message, hint=f"{settings}see {self.prog} --help")


NAME = Argument("name", "a recipe's name, its file, or the folder of a run", {"metavar": "NAME"})
SETTINGS = Argument(
    "settings",
    "settings that win over the recipe's; dry_run=true: only say what it would do",
    {"nargs": "*", "metavar": "key=value"},
)


def recipe_arguments(options: argparse.Namespace) -> list[str]:
    """`NAME key=value ...` as `recipe=NAME key=value ...`; a run's folder stands for the recipe that it ran."""
    name = options.name.removeprefix("recipe=")
    if (beside := Path(name) / "recipe.yaml").is_file():
        return [f"recipe={beside}", f"output={name}", *options.settings]
    return [f"recipe={name}", *options.settings]
