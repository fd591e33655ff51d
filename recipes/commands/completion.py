"""`draftsmith completion SHELL`: a static script for the shell, made from the table of commands.

Static, because a completion that starts Python waits for torch at every press of the key.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from ..exit_codes import OK
from ..files import demo_names
from ..load import recipe_names
from .command import Argument, Command

OPTIONS = ("stages=", "restart=", "dry_run=true", "verbose=true", "allow_import=true", "output=", "seed=")


def bash(commands: Mapping[str, Command]) -> str:
    """Completion script for bash; `compgen` and `complete` read it."""
    cases = []
    for command in commands.values():
        names = ["$recipes"] if command.takes == "recipe" else _words(command)
        words = " ".join([*names, *_settings(command), *command.options, "--help"])
        files = " -d" if command.takes in ("folder", "recipe") else ""
        cases.append(f'        {command.name}) COMPREPLY=($(compgen{files} -W "{words}" -- "$word")) ;;')
    # Bash takes "recipe=NAME" for three words.
    options = " ".join(OPTIONS)
    cases.append(f'        recipe) COMPREPLY=($(compgen -W "{options}" -- "$word"))')
    cases.append('            [ "$COMP_CWORD" -gt 3 ] || COMPREPLY=($(compgen -W "$recipes" -- "${word#=}")) ;;')
    return f"""# bash completion of draftsmith:  eval "$(draftsmith completion bash)"
_draftsmith() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" recipes="{" ".join(recipe_names())}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(commands)} recipe= --help" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{chr(10).join(cases)}
    esac
    if [ "${{#COMPREPLY[@]}}" -eq 1 ] && [[ "${{COMPREPLY[0]}}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _draftsmith draftsmith"""


def zsh(commands: Mapping[str, Command]) -> str:
    """Completion script for zsh; `compadd` and `compdef` read it."""
    names = "\n".join(f"        '{c.name}:{_quoted(c.summary)}'" for c in commands.values())
    cases = []
    for command in commands.values():
        words = " ".join([*_words(command), *command.options, "--help"])
        settings = " ".join(_settings(command))
        lines = [f"compadd -- {words}"]
        if settings:
            lines.append(f"compadd -S '' -- {settings}")
        if command.takes in ("folder", "recipe"):
            lines.append("_files -/" if command.takes == "folder" else "_files")
        cases.append(f"        {command.name}) {'; '.join(lines)} ;;")
    return f"""#compdef draftsmith
# zsh completion of draftsmith:  eval "$(draftsmith completion zsh)"
_draftsmith() {{
    local -a names
    names=(
{names}
    )
    if (( CURRENT == 2 )); then _describe command names; return; fi
    case "$words[2]" in
{chr(10).join(cases)}
    esac
}}
compdef _draftsmith draftsmith"""


def fish(commands: Mapping[str, Command]) -> str:
    """Completion script for fish: one `complete` line for each group of words."""
    lines = ["# fish completion of draftsmith:  draftsmith completion fish | source", "complete -c draftsmith -f"]
    for command in commands.values():
        first = "complete -c draftsmith -n __fish_use_subcommand"
        lines.append(f"{first} -a {command.name} -d '{_quoted(command.summary)}'")
        inside = f"complete -c draftsmith -n '__fish_seen_subcommand_from {command.name}'"
        words = " ".join([*_words(command), *_settings(command)])
        if words:
            lines.append(f"{inside} -a '{words}'")
        if command.takes in ("folder", "recipe"):
            kind = "directories" if command.takes == "folder" else "path"
            lines.append(f"{inside} -a '(__fish_complete_{kind})'")
        lines += [f"{inside} -l {option.removeprefix('--')}" for option in (*command.options, "--help")]
    return "\n".join(lines)


SHELLS: dict[str, Callable[[Mapping[str, Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def command(commands: Mapping[str, Command]) -> Command:
    """The command itself, which knows all others."""

    def run(options: argparse.Namespace) -> int:
        print(SHELLS[options.shell](commands))
        return OK

    return Command(
        name="completion",
        summary="print the completion script of bash, zsh or fish",
        description="Completion of commands, options and recipe names. Print it again after an upgrade.",
        examples=(
            ('eval "$(draftsmith completion bash)"', "in this shell; the same line in ~/.bashrc for all"),
            ('eval "$(draftsmith completion zsh)"', "after compinit"),
            ("draftsmith completion fish > ~/.config/fish/completions/draftsmith.fish", ""),
        ),
        arguments=(Argument("shell", "bash, zsh or fish", {"choices": list(SHELLS)}),),
        run=run,
        takes="shell",
    )


def _words(command: Command) -> list[str]:
    if command.takes == "shell":
        return list(SHELLS)
    if command.takes == "demo":
        return demo_names()
    return list(recipe_names()) if command.takes == "recipe" else []


def _settings(command: Command) -> tuple[str, ...]:
    return OPTIONS if command.takes in ("recipe", "demo") else ()


def _quoted(text: str) -> str:
    return text.replace("'", "").replace(":", " -")
