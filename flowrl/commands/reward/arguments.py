"""Arguments of `flowrl reward score | card | train`; nothing heavy is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_score(parser: argparse.ArgumentParser) -> None:
    """Puts the arguments of `flowrl reward score` on its parser."""
    _add_reward(parser, "rewards", "REWARD[,REWARD...]|CONFIG", "rewards to score with")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="images, or GenEval's folder layout")
    _add_prompts(parser)
    parser.add_argument("--out", type=Path, default=Path("scores.csv"), help=".csv or .jsonl to write (scores.csv)")
    _add_machine(parser)


def add_card(parser: argparse.ArgumentParser) -> None:
    """Puts the arguments of `flowrl reward card` on its parser."""
    _add_reward(parser, "reward", "REWARD|CONFIG", "the reward to examine")
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="images, several a prompt")
    _add_prompts(parser)
    parser.add_argument("--model", help="draw the images: asset:tiny-sd3, a run folder, a model folder or a hub id")
    parser.add_argument("--num-prompts", type=int, default=24, help="prompts drawn from --prompts with --model (24)")
    parser.add_argument("--samples", type=int, default=8, help="images drawn for each with --model (8)")
    parser.add_argument("--with", dest="others", default="", metavar="REWARDS", help="other rewards to compare with")
    parser.add_argument("--perturb", default="all", metavar="NAMES", help="changes to test, all or none (all)")
    parser.add_argument("--out", type=Path, help="folder of card.json and card.html (reward-card-NAME)")
    _add_machine(parser)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Puts the arguments of `flowrl reward train` on its parser; `flowrl.pretrain.train_head.train` takes them."""
    parser.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="lines of prompt, winner and loser (paths)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as backbone=clip head=mlp")


def add_rubric(parser: argparse.ArgumentParser) -> None:
    """Puts the arguments of `flowrl reward rubric` on its parser, for `flowrl.commands.reward.learn_rubric.rubric`."""
    parser.add_argument("pairs", type=Path, metavar="PAIRS.jsonl", help="lines of prompt, winner and loser (paths)")
    parser.add_argument("--out", type=Path, default=Path("rubric.json"), help="rubric to write (rubric.json)")
    parser.add_argument("--model", required=True, help="the judge: a name on the server, or a folder or hub id")
    parser.add_argument("--server", help="address of an OpenAI-compatible server; without it the model runs here")
    parser.add_argument("--key-env", metavar="NAME", help="environment variable with the server's key")
    parser.add_argument("--top", type=int, default=20, help="rules to keep at most (20)")
    parser.add_argument("--penalty", type=float, default=0.01, help="l1 penalty: higher keeps fewer rules (0.01)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of proposing, later ones for hard pairs (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of pairs (0)")
    parser.add_argument("--device", default="cpu", help="where a model in this process runs (cpu)")


def _add_reward(parser: argparse.ArgumentParser, name: str, metavar: str, what: str) -> None:
    parser.add_argument(name, metavar=metavar, help=f"{what}: names, or a YAML file with a list rewards:")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE",
        help="option of the reward; with several NAME.KEY=VALUE; may be given several times",
    )  # fmt: skip


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="the prompt of all images")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=".txt: a prompt an image, by name; .jsonl: file, prompt, metadata"
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=16, help="images scored at once (16)")
    parser.add_argument("--device", help="where rewards with weights run (cuda where there is one, else cpu)")
