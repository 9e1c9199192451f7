"""Reads judges: a name that a benchmark knows, a mapping as text, or a YAML file with one.

    offline
    {server: http://127.0.0.1:8080/v1, model: QwenVL}
    my/judge.yaml

The mapping is the option `judge` of the rewards that ask one; see `flowrl.rewards.judges.chat`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from flowrl.config.options import unknown_name
from flowrl.config.strict_yaml import parse_yaml, read_mapping
from flowrl.generation.subject import Settings
from flowrl.rewards.judges.chat import NO_TOKENS, Answer, build_chat, check_chat, is_server
from flowrl.training.model_files import named_files


def read_judge(text: str | None, known: Mapping[str, Mapping[str, Any]], *, owner: str) -> dict[str, Any]:
    """Reads and checks a judge without calling a server or loading weights. `known` are the benchmark's own, and
    `owner` names it in messages. Raises ValueError: none was given, the name is unknown, or an option is wrong."""
    names = ", ".join(known)
    how = "a mapping such as '{server: http://127.0.0.1:8000/v1, model: NAME}', or a .yaml file with one"
    if text is None:
        raise ValueError(f"{owner} needs `judge`: one of {names}, {how}.")
    if text in known:
        judge = dict(known[text])
    elif text.lstrip().startswith("{"):
        judge = parse_yaml(text, "`judge`")
    elif text.endswith((".yaml", ".yml")):
        judge = read_mapping(text)
    else:
        raise ValueError(f"`judge`: {unknown_name('judge', text, known)} Or give {how}.")
    check_chat(judge, owner=f"{owner}, `judge`")
    return judge


def judge_text(judge: str | Mapping[str, Any] | None) -> str | None:
    """Writes a judge in the form that `read_judge` takes."""
    return json.dumps(dict(judge)) if isinstance(judge, Mapping) else judge


def load_judge(settings: Settings, plan: Any) -> Any:
    """Loads the judge of a plan; None if it names none."""
    if plan.judge is None:
        return None
    return build_chat(plan.judge, device=torch.device(settings.device), owner=f"{settings.benchmark}, `judge`")


def weights_of(judge: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Identity of the weights of a judge in this process, because a folder may later hold other weights; a judge on a
    server has only its name. `version` is what the loaded judge states."""
    return {} if is_server(judge) else {"weights": version, "files": named_files(judge)}


def check_tokens(errors: Iterable[str | None]) -> None:
    """Raises an error if a judge has used all its tokens; call it after its answers are kept."""
    if NO_TOKENS in errors:
        raise ValueError(
            "the judge has used all tokens that max_tokens_total gives it: raise it, or remove it. What was answered "
            "before is kept, and the same command goes on from there."
        )


def check_alive(answers: Sequence[Answer], readable: Sequence[str | None] = (None,)) -> None:
    """Raises an error if a judge is not there or refuses everything. `readable` are errors that count as answers."""
    errors = {answer.error for answer in answers}
    if not errors & set(readable):
        words = ", ".join(sorted(str(error) for error in errors))
        raise ValueError(
            f"the judge answered none of {len(answers)} questions ({words}): check that it runs, and its address, "
            f"model and key. What it answered before is kept; the same command resumes."
        )
