"""`dlx completion`: what a shell needs to complete the words of `dlx`, made from the parser of its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dlx._support.screen import Screen
from dlx.cli.arguments import parser

__all__ = ["run"]

_FILES = ("SOURCE", "IN", "OUT", "FILE", "FOLDER")  # words of help that stand for files


class Option(NamedTuple):
    """One option of a command."""

    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...] | None  # its values; None where it takes any
    takes: bool  # whether a value follows
    files: bool  # whether that is a file


class Command(NamedTuple):
    """One command, or `dlx` itself, without a name."""

    name: str
    summary: str
    options: list[Option]
    values: tuple[str, ...] | None  # of its words that are no options
    files: bool  # whether these are files


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the script for one shell."""
    script = SHELLS[arguments.shell](commands())
    screen.block(script.rstrip("\n"))
    screen.document({"shell": arguments.shell, "script": script})
    return 0


def commands() -> list[Command]:
    """Return all commands, as the parser has them; the first is `dlx` itself."""
    top = parser()
    choices: dict[str, argparse.ArgumentParser] = {}
    summaries: dict[str, str] = {}
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices = dict(action.choices)
            summaries = {each.dest: each.help or "" for each in action._choices_actions}
    named = [_command(name, summaries[name], each) for name, each in choices.items()]
    return [_command("", "", top)._replace(values=tuple(choices)), *named]


def _command(name: str, summary: str, found: argparse.ArgumentParser) -> Command:
    options, words = [], []
    for action in found._actions:
        if not action.option_strings:
            words.append(action)
            continue
        choices = None if action.choices is None else tuple(map(str, action.choices))
        takes = action.nargs != 0
        files = takes and action.metavar in _FILES
        options.append(Option(tuple(action.option_strings), action.help or "", choices, takes, files))
    values = next((tuple(map(str, each.choices)) for each in words if each.choices is not None), None)
    return Command(name, summary, options, values, any(each.metavar in _FILES for each in words))


def _quoted(text: str) -> str:
    """Return a text in single quotes, as every shell reads it."""
    return "'" + text.replace("'", "'\\''") + "'"


# ---- bash ------------------------------------------------------------------------------------------------------------

_BASH = """\
# Completion of dlx for bash: eval "$(dlx completion bash)"
_dlx() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local command= word= words= options= files=
    COMPREPLY=()
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in {names}) command=$word; break;; esac
    done
    case "$command $previous" in
{values}
    *)
        case $command in
{commands}
        esac
        [[ $current == -* ]] && words=$options files=
        ;;
    esac
    [[ $words ]] && mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    if [[ $files ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t -O ${{#COMPREPLY[@]}} COMPREPLY < <(compgen -f -- "$current")
    fi
}}
complete -F _dlx dlx
"""


def _bash(found: list[Command]) -> str:
    values, cases = [], []
    for command in found:
        for option in command.options:
            if option.takes:
                keys = "|".join(f'"{command.name} {name}"' for name in option.names)
                told = (
                    f"words={_quoted(' '.join(option.choices))}" if option.choices else "files=1" * option.files or ":"
                )
                values.append(f"    {keys}) {told};;")
        words, options = " ".join(command.values or ()), " ".join(_names(command.options))
        told = f"words={_quoted(words)} options={_quoted(options)}{' files=1' * command.files}"
        cases.append(f"        {_quoted(command.name)}) {told};;")
    names = "|".join(command.name for command in found[1:])
    return _BASH.format(names=names, values="\n".join(values), commands="\n".join(cases))


def _names(options: Iterable[Option]) -> list[str]:
    return [name for option in options for name in option.names]


# ---- zsh -------------------------------------------------------------------------------------------------------------

_ZSH = """\
#compdef dlx
# Completion of dlx for zsh: dlx completion zsh >"${{fpath[1]}}/_dlx", or: source <(dlx completion zsh)
_dlx() {{
    local context state line
    typeset -A opt_args
    _arguments -C {top} '1: :->command' '*:: :->rest' && return
    case $state in
    command)
        local -a commands=(
{commands}
        )
        _describe command commands
        ;;
    rest)
        case $line[1] in
{cases}
        esac
        ;;
    esac
}}
if [[ $funcstack[1] == _dlx ]]; then _dlx "$@"; else compdef _dlx dlx; fi
"""


def _in_brackets(text: str) -> str:
    for each in "\\[]:":
        text = text.replace(each, f"\\{each}")
    return text


def _zsh_option(option: Option) -> str:
    value = ""
    if option.takes:
        value = (
            f":value:({' '.join(option.choices)})" if option.choices else ":file:_files" if option.files else ":value: "
        )
    return " ".join(_quoted(f"{name}[{_in_brackets(option.help)}]{value}") for name in option.names)


def _zsh(found: list[Command]) -> str:
    top, *others = found
    listed, cases = [], []
    for command in others:
        listed.append("            " + _quoted(f"{command.name}:{_in_brackets(command.summary)}"))
        words = ["'*:file:_files'"] if command.files else []
        words = [_quoted(f"*:value:({' '.join(command.values)})")] if command.values else words
        specs = " ".join([*map(_zsh_option, command.options), *words])
        cases.append(f"        {command.name}) _arguments {specs};;")
    options = " ".join(map(_zsh_option, top.options))
    return _ZSH.format(top=options, commands="\n".join(listed), cases="\n".join(cases))


# ---- fish ------------------------------------------------------------------------------------------------------------


def _fish(found: list[Command]) -> str:
    lines = ["# Completion of dlx for fish: dlx completion fish | source"]
    for command in found:
        when = f"__fish_seen_subcommand_from {command.name}" if command.name else "__fish_use_subcommand"
        start = f"complete -c dlx -n {_quoted(when)}"
        if not command.files:
            lines.append(f"{start} -f")
        if command.values and command.name:
            lines.append(f"{start} -a {_quoted(' '.join(command.values))}")
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name[:2] == "--" else f"-s {name[1:]}" for name in option.names)
            value = " -r" * option.takes + " -f" * (option.takes and not option.files)
            value += f" -a {_quoted(' '.join(option.choices))}" if option.choices else ""
            lines.append(f"{start} {names}{value} -d {_quoted(option.help)}")
    lines += [
        f"complete -c dlx -n __fish_use_subcommand -a {each.name} -d {_quoted(each.summary)}" for each in found[1:]
    ]
    return "\n".join([*lines, ""])


SHELLS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
