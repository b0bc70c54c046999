"""`megadit completion SHELL`: prints a script for shell completion of verbs, sources and options.

    megadit completion bash > ~/.local/share/bash-completion/completions/megadit
    megadit completion zsh > "${fpath[1]}/_megadit"

The script contains all names, so that pressing TAB starts no Python; write it again after an update.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megadit.models.shared.cli.options import CommandParser, command, parser_of
from megadit.models.shared.cli.setting import setting
from megadit.models.shared.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOptions:
    shell: Literal["bash", "zsh", "tcsh"] = setting(help="bash, zsh or tcsh", positional=True)


@command(CompletionOptions, prog="megadit completion", description=__doc__)
def main(options: CompletionOptions) -> None:
    """Prints the script; returns the exit code."""
    import shtab

    print(shtab.complete(whole_parser(), options.shell))


def whole_parser() -> argparse.ArgumentParser:
    """A parser with all verbs as subcommands; verbs with missing libraries have no options."""
    from megadit.models.shared.cli.verbs import VERBS, load

    tree = _Tree(argparse.ArgumentParser(prog="megadit"))
    for verb, (_, description) in VERBS.items():
        with suppress(UserError):
            function = load(verb)
            sources = getattr(sys.modules[function.__module__], "SOURCES", {})
            for words in [[*verb.split(), source] for source in sources] or [verb.split()]:
                own = words[len(verb.split()) :]
                tree.add(words, description, parser_of(partial(function, own)))
    return tree.root


class _Tree:
    """Nested parsers of commands with one, two or three words."""

    def __init__(self, root: argparse.ArgumentParser) -> None:
        self.root = root
        self._below: dict[tuple[str, ...], argparse._SubParsersAction] = {}
        self._parsers = {(): root}

    def add(self, words: Sequence[str], description: str, parser: CommandParser | None) -> None:
        for place in range(len(words)):
            before, here = tuple(words[:place]), tuple(words[: place + 1])
            if here in self._parsers:
                continue
            if before not in self._below:
                self._below[before] = self._parsers[before].add_subparsers()
            for action in parser._actions if parser is not None else ():
                action.choices = action.choices or getattr(action, "known", None) or None
            parents = [parser] if parser is not None and place + 1 == len(words) else []
            own = {"parents": parents, "add_help": not parents, "help": description.replace("%", "%%")}
            self._parsers[here] = self._below[before].add_parser(words[place], **own)
