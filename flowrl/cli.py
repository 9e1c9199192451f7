"""The command line: `flowrl COMMAND ...`.

A command is a file of `flowrl.commands` with `add_arguments(parser)` and `run(parsed) -> exit code`; it imports nothing
heavy, so that `--help` and wrong flags answer at once. Every error is one paragraph on standard error and exit code 1,
those of the command line itself 2; an interrupt exits with 130. Errors name parameters in backticks, as Python has
them; here they are said as the command's flags.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import select
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from flowrl.config.spelling import closest
from flowrl.runtime.call import answering
from flowrl.runtime.failures import describe_error, speaker
from flowrl.runtime.former_names import COMMANDS as FORMER_COMMANDS
from flowrl.runtime.former_names import name_of_today
from flowrl.runtime.private_names import flags_of, names_of
from flowrl.runtime.process_settings import before_libraries_load
from flowrl.runtime.scrubbing import say as print
from flowrl.runtime.versions import version_text

COMMANDS: dict[str, str] = {
    "init": "write a first configuration for a model and a card",
    "list": "list configurations, rewards, methods, families, keys",
    "data list": "list published prompt sets that configurations need",
    "data get": "fetch a published prompt set into the folder data",
    "train": "train a model with reinforcement learning",
    "plan": "show what a run will do and need, before any download",
    "doctor": "say what would stop a run, or went wrong in one",
    "bench": "time the phases of an iteration on this machine",
    "compare": "train several methods to one budget and compare them",
    "sample": "draw images or videos from a base or tuned model",
    "eval": "measure models on a benchmark and compare them",
    "sweep": "measure guidance scales and search: quality, diversity, cost",
    "report": "write a run's report.html",
    "watch": "show runs on a local page while they train",
    "push": "write a run's model card beside its LoRA, and upload both",
    "merge": "merge a run's LoRA into the weights of its base model",
    "export": "write a run's LoRA for ComfyUI, kohya, PEFT or diffusers",
    "serve": "serve rewards over HTTP",
    "reward score": "score a folder of images",
    "reward card": "measure how reliable a reward is",
    "reward train": "train a preference head on pairs of images",
    "reward rubric": "let a judge find rules that explain pairs of images",
    "reward realism": "measure how near a run's images are to drawn scenes",
    "reward published": "print which published scores the rewards reproduce",
    "completion": "print a script that completes commands and keys in a shell",
    "pretrain": "make an embedded model, scorer or prompt list from scratch",
}
"""Every command and what it does; two words are a folder within a folder."""
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}

FORMER: dict[str, str] = {
    "--num-steps": "--steps", "--guidance-scale": "--guidance", "--base-guidance-scale": "--base-guidance",
    "--base": "--before-training", "--compare": "--baseline", "--seeds": "--num-seeds", "--model": "--judge",
    "--server": "--judge", "--key-env": "--judge",
}  # fmt: skip
"""What flags were called before, or are called elsewhere, in the commands that have the new one only."""


class _Parser(argparse.ArgumentParser):
    """Argparse with errors of one paragraph, and lists of numbers that begin with a minus as values of flags."""

    def __init__(self, command: str) -> None:
        described = f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}."
        super().__init__(prog=f"flowrl {command}", description=described, allow_abbrev=False)
        self._negative_number_matcher = re.compile(r"^-\.?\d")  # argparse's own takes one number alone

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong is not None:
            near = closest(wrong[1], names := re.findall(r"[\w-]+", wrong[2]))
            hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
            message = f"{message[: wrong.start()]}there is no {wrong[1]!r}: {hint}"
        message = re.sub(r"invalid (?:int|float) value: ", "must be a number without a unit, such as 10, got ", message)
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    before_libraries_load()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        return _tell(version_text())
    group = [word for word in words[:1] if word in GROUPS]
    if words[len(group) : len(group) + 1] in ([], ["-h"], ["--help"]):
        return _tell(overview(*group), error=not words[len(group) :])
    with answering(shlex.join(["flowrl", *words])):
        name = name_of_today(" ".join(words[: len(group) + 1]), FORMER_COMMANDS, "flowrl {}")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *GROUPS], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"flowrl: there is no command {name!r}: {hint}", file=sys.stderr)
        return 1
    parsed = parse(name, words[len(group) + 1 :])
    with answering(shlex.join(["flowrl", *words])):
        try:
            code = int(command_module(name).run(parsed))
            if sys.stdout is not None:  # it was closed from the start
                sys.stdout.flush()
            return code
        except KeyboardInterrupt as stop:
            print(f"\n{str(stop) or 'Stopped.'}", file=sys.stderr)
            return 130
        except BaseException as error:  # the one place where a traceback would reach the terminal
            if not (isinstance(error, BrokenPipeError) and _nobody_reads()):
                print(f"{speaker()}: {in_flags(describe_error(error), name)}", file=sys.stderr)
            return 1


def _tell(text: str, *, error: bool = False) -> int:
    """Prints it, unless who would read it has gone; the exit code."""
    try:
        print(text, file=sys.stderr if error else sys.stdout, flush=True)
    except BrokenPipeError:
        if error or not _nobody_reads():
            raise
    return 2 if error else 0


def overview(group: str = "") -> str:
    """All commands, or those of a group, one per line."""
    shown = {name: said for name, said in COMMANDS.items() if name.startswith(f"{group} " if group else "")}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {said}" for name, said in shown.items()]
    head = f"usage: flowrl {group or 'COMMAND'} ...\n\nReinforcement learning for diffusion and flow models.\n"
    foot = "\n'flowrl COMMAND --help' lists what a command takes."
    return "\n".join([head, *lines, foot, *([] if group else ["'flowrl --version' names the version."])])


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command, flags and others in any order. Raises SystemExit: 2 where they are wrong, after a
    paragraph that says how; 0 after --help."""
    parser = _Parser(name)
    command_module(name).add_arguments(parser)
    known = flags_of(parser)
    for word in words:
        flag, _, value = word.partition("=")
        if flag.startswith("--") and value == "--":  # which argparse would make a list
            parser.error(f"{flag} has no value: write {flag}=VALUE")
        if flag.startswith("--") and flag not in (*known, "--"):
            near = [
                FORMER.get(flag, ""),
                *(
                    f"--{name}"
                    for name in difflib.get_close_matches(flag[2:], [text.removeprefix("--") for text in known], n=1)
                ),
            ]
            hints = [f"did you mean {text}?" for text in near if text in known]
            usual = f"{parser.prog} --help lists those there are"
            if "key=value" in parser.format_usage():
                usual = f"a setting has no dashes: {flag[2:].replace('-', '_')}=VALUE"
            parser.error(f"unknown flag {flag}: {hints[0] if hints else usual}")
    parsed, rest = parser.parse_known_intermixed_args(words)
    if rest:
        parser.error(f"unexpected {' '.join(rest)}: {parser.prog} --help says what it takes")
    return parsed


def in_flags(text: str, command: str) -> str:
    """A message with each `parameter` in backticks as the command's flag, or as what stands for a word without one.

    What the command does not have itself is a flag of train: each that reads a configuration may speak of it.
    """
    flags: dict[str, str] = {}
    for name in ("train", command):
        parser = _Parser(name)
        command_module(name).add_arguments(parser)
        flags |= names_of(parser)
    return re.sub(r"`(\w+)`", lambda found: flags.get(found[1], found[0]), text)


def _nobody_reads() -> bool:
    """Whether who read the output has gone, as in `flowrl plan CONFIG | head`; what is left of it is dropped then."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    gone = any(events & select.POLLERR for _, events in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python flushes once more at its end
    return gone


def command_module(command: str) -> Any:
    """The file of a command: `add_arguments(parser)` and `run(parsed)`."""
    return importlib.import_module(f"flowrl.commands.{command.replace(' ', '_')}")


if __name__ == "__main__":
    sys.exit(main())
