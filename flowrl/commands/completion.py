"""`flowrl completion SHELL`: prints a script with the current words; it starts nothing when you press a key."""

from __future__ import annotations

import argparse
import importlib

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `flowrl completion` takes."""
    parser.description = (
        "Print a script that completes commands, configurations and keys in a shell. For this session: "
        'bash: eval "$(flowrl completion bash)"; zsh: eval "$(flowrl completion zsh)"; '
        "fish: flowrl completion fish | source"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(parsed: argparse.Namespace) -> int:
    """Prints the script."""
    from flowrl.config.base import config_files
    from flowrl.config.strict_yaml import dotted_keys
    from flowrl.config.train import TrainConfig

    commands = importlib.import_module("flowrl.cli").COMMANDS  # the table of commands imports this one
    first = list(dict.fromkeys(name.split()[0] for name in commands))
    second: dict[str, list[str]] = {}
    for name in commands:
        if " " in name:
            second.setdefault(name.split()[0], []).append(name.split()[1])
    keys = [f"{key}=" for key in dotted_keys(TrainConfig)]
    configs = list(config_files())
    if parsed.shell == "fish":
        lines = []
        for name, said in commands.items():
            group, _, word = name.partition(" ")
            seen = f"__fish_seen_subcommand_from {group}" if word else "__fish_use_subcommand"
            quoted = said.replace("'", "\\'")
            lines.append(f"complete -c flowrl -n '{seen}' -a '{word or group}' -d '{quoted}'")
        for words in (configs, keys):
            lines.append(
                f"complete -c flowrl -n '__fish_seen_subcommand_from {' '.join(CONFIGURED)}' -a '{' '.join(words)}'"
            )
        print("\n".join(lines))
        return 0
    groups = "\n".join(
        f'        {name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;' for name, words in second.items()
    )
    zsh = "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n" if parsed.shell == "zsh" else ""
    script = _BASH.format(
        commands=" ".join(first),
        configured="|".join(CONFIGURED),
        groups=groups,
        configs=" ".join(configs),
        keys=" ".join(keys),
    )
    print(zsh + script, end="")
    return 0
