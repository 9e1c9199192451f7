"""The command line: `flowrl train | plan | compare | sample | eval | sweep | report | serve | reward | pretrain`.

Heavy libraries are imported inside the commands, so that `--help` and configuration errors answer at once. Errors that
a user can mend are one paragraph on standard error and exit code 1; an interrupt exits with 130.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.commands.eval.arguments import add_eval
from flowrl.commands.plan.arguments import add_plan
from flowrl.commands.reward import arguments as reward_arguments
from flowrl.commands.serve import add_arguments as serving_arguments
from flowrl.commands.sweep.arguments import add_sweep

COMMANDS = ("train", "plan", "compare", "sample", "eval", "sweep", "report", "serve", "reward", "pretrain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"flowrl: there is no command {arguments[0]!r}: {hint}", file=sys.stderr)
        return 1
    parsed = _parse(arguments)
    try:
        return int(parsed.run(parsed))
    except KeyboardInterrupt:
        print(
            "\nStopped. A training run continues from its last checkpoint with 'flowrl train resume=RUN'.",
            file=sys.stderr,
        )
        return 130
    except (ValueError, OSError) as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flowrl", description="Reinforcement learning for diffusion and flow models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train", help="train a LoRA with reinforcement learning",
        description="Train a LoRA. Without CONFIG the embedded model is trained, a few minutes on two cores. "
        "resume=RUN continues a run with its own configuration.",
    )  # fmt: skip
    train.add_argument("config", nargs="?", help="a YAML file, or the name of one that ships with flowrl")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    train.set_defaults(run=_train)

    plan = commands.add_parser("plan", help="what a run will do and need, before any download")
    add_plan(plan)
    plan.set_defaults(run=_plan)

    compare = commands.add_parser(
        "compare", help="train several methods to one budget and compare them",
        description="Train every CONFIG with every seed to the same budget, then write a table and a page. The same "
        "command goes on where it was stopped; methods and seeds may be added.",
    )  # fmt: skip
    compare.add_argument("arguments", nargs="*", metavar="CONFIG|key=value", help="YAML files; settings of all runs")
    compare.add_argument("--out", type=Path, required=True, help="folder of the comparison")
    compare.add_argument("--budget", help="of each run: nfe=NUMBER, seconds=NUMBER or images=NUMBER")
    compare.add_argument("--seeds", type=int, help="training seeds of each method, counted from 0 (3)")
    compare.add_argument("--evals", type=int, help="evaluations spread over the budget (2)")
    compare.add_argument("--jobs", type=int, default=1, help="trainings side by side (1)")
    compare.add_argument("--baseline", help="method that the others are compared to (the first)")
    compare.add_argument("--metric", help="evaluation metric of the table (eval/geneval/score, or the first reward)")
    compare.add_argument("--targets", help="scores whose cost is tabulated, such as 0.6,0.7 (thirds of the gain)")
    compare.add_argument("--report-only", action="store_true", help="only write table and page again")
    compare.set_defaults(run=_compare)

    sample = commands.add_parser("sample", help="draw images from a base or tuned model")
    sample.add_argument(
        "source", nargs="?", default="asset:tiny-sd3", help="run folder, model folder, hub id or asset:NAME"
    )
    sample.add_argument("--prompt", action="append", default=[], help="a prompt; may be given several times")
    sample.add_argument("--prompts", type=Path, help="a .txt, .jsonl or .csv file of prompts")
    sample.add_argument(
        "--source", dest="source_image", type=Path, action="append",
        help="an image that --prompt edits or animates; may be given several times",
    )  # fmt: skip
    sample.add_argument("--seeds", default="0", help="seeds of the start noise: 0,3,7 or 0-3")
    sample.add_argument("--base", action="store_true", help="of a run: the model before training")
    sample.add_argument("--lora", type=Path, action="append", help="a LoRA folder to add; several with --rlg")
    sample.add_argument(
        "--rlg", metavar="SCALES", help="guidance from base to tuned: one number a LoRA, 1 is the tuned"
    )
    sample.add_argument("--rlg-from", type=int, metavar="M", help="leave the first M steps to the tuned model alone")
    sample.add_argument(
        "--rlg-interval", metavar="LOW,HIGH", help="leave noise levels outside to the tuned model alone"
    )
    sample.add_argument(
        "--base-guidance-scale", type=float, help="classifier-free guidance of the base under --rlg (the tuned one's)"
    )
    sample.add_argument("--num-steps", type=int, help="denoising steps (a run's own, embedded model 10, else 40)")
    sample.add_argument(
        "--guidance-scale", type=float, help="classifier-free guidance (a run's own, embedded model 3, else 4.5)"
    )
    sample.add_argument(
        "--max-sequence-length", type=int, help="T5 tokens (a run's own, 16 for the embedded model, else 128)"
    )
    sample.add_argument("--out", type=Path, default=Path("samples"), help="folder of the PNG files and the grid")
    sample.set_defaults(run=_sample)

    evaluation = commands.add_parser("eval", help="measure models on a benchmark, with intervals, and compare them")
    add_eval(evaluation)
    evaluation.set_defaults(run=_eval)

    sweep = commands.add_parser("sweep", help="guidance scales and search: quality against diversity and cost")
    add_sweep(sweep)
    sweep.set_defaults(run=_sweep)

    report = commands.add_parser("report", help="write a run's report.html")
    report.add_argument("folder", type=Path, help="run folder")
    report.add_argument("--out", type=Path, help="file to write (RUN/report.html)")
    report.set_defaults(run=_report)

    pretrain = commands.add_parser("pretrain", help="make an embedded model, scorer or prompt list from scratch")
    pretrain.add_argument(
        "overrides", nargs="*", metavar="[sd3 | sd15 | wan | kontext | scorer | prompts] key=value",
        help="which model (sd3), tens of minutes on two cores; scorer: the embedded world's differentiable reward; "
        "prompts: the lists in assets/prompts",
    )  # fmt: skip
    pretrain.set_defaults(run=_pretrain)

    serve = commands.add_parser("serve", help="serve rewards over HTTP")
    serving_arguments(serve)
    serve.set_defaults(run=_serve)

    reward = commands.add_parser("reward", help="score images, examine a reward, or train one of your own")
    actions = reward.add_subparsers(required=True, metavar="score | card | train | rubric | realism")
    score = actions.add_parser("score", help="score a folder of images")
    reward_arguments.add_score(score)
    score.set_defaults(run=_reward_score)
    card = actions.add_parser("card", help="how reliable a reward is: retest, JPEG, resize, order, cost")
    reward_arguments.add_card(card)
    card.set_defaults(run=_reward_card)
    train = actions.add_parser("train", help="train a preference head on pairs of images")
    reward_arguments.add_train(train)
    train.set_defaults(run=_reward_train)
    rubric = actions.add_parser("rubric", help="let a judge find rules that explain pairs of images")
    reward_arguments.add_rubric(rubric)
    rubric.set_defaults(run=_reward_rubric)
    realism = actions.add_parser("realism", help="distance of a run's images to drawn scenes (embedded world)")
    realism.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs that kept all evaluation images")
    realism.set_defaults(run=_reward_realism)
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Arguments in any order: what stands after an option joins what stands before (argparse would refuse it)."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(parsed, "arguments") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.arguments += rest
    return parsed


def _train(parsed: argparse.Namespace) -> int:
    from flowrl.commands.train.run import train

    given = [text for text in (parsed.config, *parsed.overrides) if text is not None]
    config = None if not given or "=" in given[0] else given[0]
    return train(config, given if config is None else given[1:])


def _plan(parsed: argparse.Namespace) -> int:
    from flowrl.commands.plan.run import plan

    return plan(parsed)


def _compare(parsed: argparse.Namespace) -> int:
    from flowrl.commands.compare.run import compare

    return compare(parsed)


def _sample(parsed: argparse.Namespace) -> int:
    from flowrl.commands.sample import sample

    return sample(parsed)


def _eval(parsed: argparse.Namespace) -> int:
    from flowrl.commands.eval.run import evaluate

    return evaluate(parsed)


def _sweep(parsed: argparse.Namespace) -> int:
    from flowrl.commands.sweep.run import sweep

    return sweep(parsed)


def _report(parsed: argparse.Namespace) -> int:
    from flowrl.commands.report.run import write_report

    print(f"wrote {write_report(parsed.folder, parsed.out)}")
    return 0


def _pretrain(parsed: argparse.Namespace) -> int:
    from flowrl.pretrain.making import pretrain

    print(f"wrote {pretrain(parsed.overrides)}")
    return 0


def _serve(parsed: argparse.Namespace) -> int:
    from flowrl.commands.serve import serve

    return serve(parsed)


def _reward_score(parsed: argparse.Namespace) -> int:
    from flowrl.commands.reward.score import score

    return score(parsed)


def _reward_card(parsed: argparse.Namespace) -> int:
    from flowrl.commands.reward.card import card

    return card(parsed)


def _reward_train(parsed: argparse.Namespace) -> int:
    from flowrl.pretrain.train_head import train

    return train(parsed)


def _reward_rubric(parsed: argparse.Namespace) -> int:
    from flowrl.commands.reward.learn_rubric import rubric

    return rubric(parsed)


def _reward_realism(parsed: argparse.Namespace) -> int:
    from flowrl.commands.reward.run_realism import realism

    return realism(parsed)


if __name__ == "__main__":
    sys.exit(main())
