"""`ncclguard completion bash|zsh|fish`: a script, made from the parsers, that completes commands and options."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ncclguard.__main__ import COMMANDS
from ncclguard_explain.command_line import Parser, described

SHELLS: Final = ("bash", "zsh", "fish")
EXIT_CODES: Final = {0: "the script was printed", 2: "there is no such shell"}
#: The beginnings of the names of values that are files or folders.
_FILES: Final = ("FILE", "PATH", "CONFIG")


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its spellings, its help, whether it takes a value, and the values to choose from."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    file: bool


@dataclass(frozen=True, slots=True)
class Syntax:
    """The options and argument words of a command; no words means that files are completed."""

    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="ncclguard completion", description="Print a script for a shell that completes what one types."
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads it")
    examples = {
        'eval "$(ncclguard completion bash)"': "in ~/.bashrc; for zsh in ~/.zshrc, after compinit",
        "ncclguard completion fish > ~/.config/fish/completions/ncclguard.fish": "once, for fish",
    }
    return described(parser, examples, EXIT_CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script; returns 0."""
    shell = build_parser().parse_args(argv).shell
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[shell](syntax()))
    return 0


def syntax() -> dict[str, Syntax]:
    """Return each command's syntax; a command whose packages are missing has its name and help only."""
    found = {}
    for name, command in COMMANDS.items():
        if command.available:
            try:
                parser = importlib.import_module(command.module).build_parser()
            except (ImportError, AttributeError):  # without torch, `bench` cannot even build its parser
                parser = argparse.ArgumentParser()
            found[name] = Syntax(command.help, tuple(_options(parser)), tuple(_words(parser)))
    return found


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        if action.option_strings:
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            yield Option(
                names=tuple(action.option_strings),
                help=re.split(r"[;(]|,? ?default:", action.help or "")[0].strip()
                or action.option_strings[-1].strip("-"),
                takes_value=action.nargs != 0,
                choices=tuple(map(str, action.choices or ())),
                file=metavar.startswith(_FILES) or action.type is Path,
            )


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings:
            yield from map(str, action.choices or ())


def bash(commands: Mapping[str, Syntax]) -> str:
    """Return the script for bash."""
    values, options, words = [], [], []
    for name, command in commands.items():
        for option in command.options:
            if option.takes_value:
                pattern = "|".join(f'"{name} {spelling}"' for spelling in option.names)
                if option.choices:
                    reply = f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$current"))'
                else:
                    reply = 'COMPREPLY=($(compgen -f -- "$current"))' if option.file else ":"
                values.append(f"        {pattern}) {reply}; return ;;")
        spellings = " ".join(spelling for option in command.options for spelling in option.names)
        options.append(f'            {name}) COMPREPLY=($(compgen -W "{spellings}" -- "$current")) ;;')
        if command.words:
            words.append(f'        {name}) COMPREPLY=($(compgen -W "{" ".join(command.words)}" -- "$current")) ;;')
    return "\n".join(
        [
            "# bash completion of ncclguard, made by `ncclguard completion bash`",
            "_ncclguard() {",
            "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}",
            "    COMPREPLY=()",
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f'        COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$current"))',
            "        return",
            "    fi",
            '    case "$command $previous" in',
            *values,
            "    esac",
            '    if [ "${current#-}" != "$current" ]; then',
            '        case "$command" in',
            *options,
            "        esac",
            "        return",
            "    fi",
            '    case "$command" in',
            *words,
            '        *) COMPREPLY=($(compgen -f -- "$current")) ;;',
            "    esac",
            "}",
            "complete -o filenames -F _ncclguard ncclguard",
            "",
        ]
    )


def zsh(commands: Mapping[str, Syntax]) -> str:
    """Return the script for zsh."""

    def text(words: str) -> str:
        return re.sub(r"([\\\[\]:])", r"\\\1", words).replace("'", "'\\''")

    cases = []
    for name, command in commands.items():
        lines = []
        for option in command.options:
            action = f"({' '.join(option.choices)})" if option.choices else "_files" if option.file else " "
            value = f":value:{action}" if option.takes_value else ""
            lines += [f"'{spelling}[{text(option.help)}]{value}'" for spelling in option.names]
        lines.append(f"'*:word:({' '.join(command.words)})'" if command.words else "'*:file:_files'")
        cases.append(f"        {name}) _arguments \\\n            " + " \\\n            ".join(lines) + " ;;")
    names = " ".join(f"'{name}:{text(command.help)}'" for name, command in commands.items())
    return "\n".join(
        [
            "#compdef ncclguard",
            "# zsh completion of ncclguard, made by `ncclguard completion zsh`",
            "_ncclguard() {",
            "    local -a commands",
            f"    commands=({names})",
            "    if (( CURRENT == 2 )); then",
            "        _describe command commands",
            "        return",
            "    fi",
            "    shift words",
            "    (( CURRENT-- ))",
            "    case $words[1] in",
            *cases,
            "    esac",
            "}",
            'if [ "$funcstack[1]" = _ncclguard ]; then _ncclguard "$@"; else compdef _ncclguard ncclguard; fi',
            "",
        ]
    )


def fish(commands: Mapping[str, Syntax]) -> str:
    """Return the script for fish."""

    def quoted(words: str) -> str:
        return "'" + words.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# fish completion of ncclguard, made by `ncclguard completion fish`", "complete -c ncclguard -f"]
    for name, command in commands.items():
        lines.append(f"complete -c ncclguard -n __fish_use_subcommand -a {name} -d {quoted(command.help)}")
        inside = f"complete -c ncclguard -n '__fish_seen_subcommand_from {name}'"
        for option in command.options:
            spellings = " ".join(f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in option.names)
            value = ""
            if option.choices:
                value = f" -x -a {quoted(' '.join(option.choices))}"
            elif option.takes_value:
                value = " -r -F" if option.file else " -x"
            lines.append(f"{inside} {spellings} -d {quoted(option.help)}{value}")
        lines.append(f"{inside} -a {quoted(' '.join(command.words))}" if command.words else f"{inside} -F")
    return "\n".join([*lines, ""])
