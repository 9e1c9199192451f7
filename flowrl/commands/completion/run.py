"""`flowrl completion SHELL`: a script with the words that there are now; it starts nothing when a key is pressed."""

from __future__ import annotations

import argparse
import importlib

from flowrl.config.base import config_files
from flowrl.config.strict_yaml import dotted_keys
from flowrl.config.train import TrainConfig

CONFIGURED = ("train", "plan", "bench", "compare")
"""Commands that take a configuration and key=value."""

_BASH = """\
_flowrl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
        {configured}) COMPREPLY=($(compgen -W "{configs} {keys}" -- "$word") $(compgen -f -- "$word")) ;;
{groups}
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
    case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -F _flowrl flowrl
"""


def run(parsed: argparse.Namespace) -> int:
    """Prints the script."""
    commands = importlib.import_module("flowrl.cli").COMMANDS  # the table of commands imports this one
    first = list(dict.fromkeys(name.split()[0] for name in commands))
    second: dict[str, list[str]] = {}
    for name in commands:
        if " " in name:
            second.setdefault(name.split()[0], []).append(name.split()[1])
    keys = [f"{key}=" for key in dotted_keys(TrainConfig)]
    print(_fish(commands, keys) if parsed.shell == "fish" else _bash(parsed.shell, first, second, keys), end="")
    return 0


def _bash(shell: str, first: list[str], second: dict[str, list[str]], keys: list[str]) -> str:
    groups = "\n".join(f'        {name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;'
                       for name, words in second.items())  # fmt: skip
    script = _BASH.format(commands=" ".join(first), configured="|".join(CONFIGURED), groups=groups,
                          configs=" ".join(config_files()), keys=" ".join(keys))  # fmt: skip
    zsh = "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n"
    return script if shell == "bash" else zsh + script


def _fish(commands: dict[str, str], keys: list[str]) -> str:
    lines = []
    for name, said in commands.items():
        group, _, word = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {group}" if word else "__fish_use_subcommand"
        quoted = said.replace("'", "\\'")
        lines.append(f"complete -c flowrl -n '{seen}' -a '{word or group}' -d '{quoted}'")
    for words in (list(config_files()), keys):
        lines.append(
            f"complete -c flowrl -n '__fish_seen_subcommand_from {' '.join(CONFIGURED)}' -a '{' '.join(words)}'"
        )
    return "\n".join(lines) + "\n"
