"""What others read holds no secret, and nothing of it acts on a terminal."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from tiny_runs import tiny_runs

from flowrl.cli import main
from flowrl.rewards.base.outputs import MOST_WORDS, log_word, log_words
from flowrl.runtime.failures import explain
from flowrl.runtime.scrubbing import (
    one_line,
    printable,
    remember_secret,
    say,
    settings_without_secrets,
    without_secrets,
)

HEX = "0123456789abcdef0123456789abcdef01234567"
HIDDEN = "hunter2Zq9"


@pytest.mark.parametrize(
    "text",
    [
        "401 for https://user:hunter2Zq9@host/x?token=hf_abcdefghij",
        "https://user:p@ss:hunter2Zq9@host:8080/x",
        "https://hunter2Zq9@github.com/a/b",
        "postgresql+psycopg://me:hunter2Zq9@db/one",
        quote("https://user:hunter2Zq9@host/x", safe=""),
        quote(quote("https://user:hunter2Zq9@host/x", safe=""), safe=""),
        quote("https://h/x?a=1&token=hunter2Zq9&b=2", safe=""),
        '{"url": "https:\\/\\/user:hunter2Zq9@host\\/x"}',
        *(
            f"GET https://h/x?a=1&{name}=hunter2Zq9&b=2 failed"
            for name in (
                "token", "key", "api_key", "apikey", "access_token", "sig", "signature", "X-Amz-Signature", "password",
                "X-Amz-Security-Token", "X-Amz-Credential", "secret", "client_secret", "auth", "AWSAccessKeyId", "pwd",
            )
        ),
        "Authorization: Bearer hunter2Zq9", "authorization: basic hunter2Zq9==", "Authorization=Token hunter2Zq9",
        "{'Authorization': 'Bearer hunter2Zq9', 'x': 1}", '{\\"Authorization\\": \\"Bearer hunter2Zq9\\"}',
        "{b'authorization': b'Bearer hunter2Zq9'}", "sent Bearer hunter2Zq9 to it", "x-api-key: hunter2Zq9",
        "password=hunter2Zq9", "api_key='hunter2Zq9'", '{"api_key": "hunter2Zq9"}', "MY_TOKEN=hunter2Zq9 python x.py",
        "password: hunter2Zq9", "HF_TOKEN=hunter2Zq9", "db_password = hunter2Zq9",
        "https://user:pa/hunter2Zq9@host/x", "curl -u me:hunter2Zq9 https://h", "tool --api-key hunter2Zq9 -n 3",
        "Cookie: session=hunter2Zq9; theme=dark", "<Cookie sid=hunter2Zq9 for h />", "AccountKey=hunter2Zq9==;x",
        "Authorization: Digest username='me', response='hunter2Zq9'", "[(b'x-api-key', b'hunter2Zq9')]",
        "https://hooks.slack.com/services/T0/B0/hunter2Zq9", "token (hunter2Zq9) was refused",
        "https://discord.com/api/webhooks/12/hunter2Zq9", "password: 'hunter2Zq9'",
        "machine h login me password hunter2Zq9",
        '{"private_key": "-----BEGIN PRIVATE KEY-----\\nhunter2Zq9\\n-----END PRIVATE KEY-----"}',
        "\x1b[1mpassword\x1b[0m=\x1b[31mhunter2Zq9", "Incorrect API key provided: hunter2Zq9.",
        'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\n    get("https://u:hunter2Zq9@h")\nValueError',
    ],
)  # fmt: skip
def test_a_secret_of_an_address_or_a_name_is_left_out(text: str) -> None:
    assert HIDDEN not in without_secrets(text)
    assert "SECRET" in without_secrets(text)
    assert without_secrets(text).count("\n") == text.count("\n")


@pytest.mark.parametrize(
    "secret",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUv", "hf_abcdefgh1", "sk-abcdefghijklmnop1234", "sk-proj-abc_def-ghijklmnop12",
        "ghp_abcdefghijklmnopqrstu1", "github_pat_abcdefghijklmnopqrst", "AKIAABCDEFGHIJKLMNOP",
        "glpat-abcdefghijklmnop", "npm_abcdefghijklmnopqrstuvwxyz0123456789", "sk_live_abcdefgh1234",
        "ya29.abcdefghij12",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcDEF",
    ],
)  # fmt: skip
def test_a_secret_of_a_known_form_is_left_out(secret: str) -> None:
    assert without_secrets(f"a {secret}, b") == "a SECRET, b"
    assert secret not in without_secrets(quote(f"https://h/x?q={secret}&b=1", safe=""))


@pytest.mark.parametrize("before", ["api_key: ", "WANDB_API_KEY=", "wandb login ", "wandb key ", "the API key is "])
def test_a_key_of_40_digits_is_one_after_such_words(before: str) -> None:
    assert HEX not in without_secrets(f"{before}{HEX}")


@pytest.mark.parametrize(
    "text",
    [
        "a photo of a key: value pair", "secret = garden", "max_token=77", "primary_key=id", "cookie: chocolate chip",
        "unknown key 'StableDiffusion3Pipeline'", "tokenizer/token_list_B12aZ9.json",
        "a secret: garden", "password is needed", "two tokens: 77 of 77",
        f"commit {HEX}", f"git_commit: {HEX}", f"sha256:{HEX}{HEX[:24]}", "/home/me/runs/tiny-1/lora/x.safetensors",
        "unknown key 'sampler.guidance': did you mean sampler.guidance_scale?",
        "max_tokens=77, eos_token=<|endoftext|>",
        "Authorization: Bearer TOKEN.", "a bearer of bad news", "http://127.0.0.1:8190/v1/score",
        "https://host:8080/a?seed=3&size=512", "git@github.com:a/b.git", "ssh://git@github.com/a/b.git",
        "token_env: REWARD_TOKEN", "token_env=REWARD_TOKEN", "flowrl serve x --token-env NAME",
        "api_key_env='OPENAI_KEY'",
        "password=None", "api_key=null", "hf_hub_download", "hf_transfer is not installed",
        "task-conditioned-generation-2",
        "a monkey=banana", "mail me@host.org", "credit.method=turning_points", "key=value", "12:30 at the 3rd @ place",
        "label: token: 1234567", "asset:prompts/world_train.jsonl", "C:\\Users\\me\\x.png", "turkey: 7 of 8 keys",
    ],
)  # fmt: skip
def test_other_text_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_values_of_secret_variables_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "plain words/here")
    monkeypatch.setenv("SHORT_KEY", "tiny")
    monkeypatch.setenv("PLACE_KEY", str(tmp_path))
    assert without_secrets("a plain words/here b plain%20words%2Fhere c tiny") == "a SECRET b SECRET c tiny"
    assert without_secrets(f"in {tmp_path}") == f"in {tmp_path}"
    remember_secret("of-a-variable-by-another-name")
    assert without_secrets("it is of-a-variable-by-another-name") == "it is SECRET"


def test_settings_keep_their_shape() -> None:
    given = {
        "rewards": [{"url": "https://u:hunter2Zq9@h"}],
        "token": "hunter2Zq9",
        "token_env": "NAME",
        "lr": 1,
    }
    assert settings_without_secrets(given) == {
        "rewards": [{"url": "https://SECRET@h"}], "token": "SECRET", "token_env": "NAME", "lr": 1,
    }  # fmt: skip


def test_a_paragraph_holds_no_secret() -> None:
    assert HIDDEN not in explain(RuntimeError("401 for https://user:hunter2Zq9@host"))
    assert HIDDEN not in explain(ValueError("option url: https://h/?token=hunter2Zq9"))
    assert HIDDEN not in explain(FileNotFoundError(2, "no", "https://user:hunter2Zq9@host"))


def test_control_characters_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[31m\u202eb\r\x07\x9b\u2066\ud800") == "a\\x1b[31m\\u202eb\\r\\x07\\x9b\\u2066\\ud800"
    kept = "two lines\n\twith ümlaut, 中文, عربي, 👩\u200d🚀 and “quotes”"
    assert printable(kept) == kept
    say("a\x1b[2J", 3, end="!")
    assert capsys.readouterr().out == "a\\x1b[2J 3!"
    assert one_line("a\nb\x1b" + "c" * 300) == "a b\\x1b" + "c" * 190 + "..."


LEAKING = """
calls = []

def reward(images, prompts, metadata):
    calls.append(1)
    if len(calls) > 1:
        raise RuntimeError("401 for https://user:hunter2Zq9@host/x?token=hf_hunter2Zq9, \\x1b[2J")
    return images.mean((1, 2, 3)) * 100
"""


def test_a_run_that_an_error_stops_keeps_no_secret(
    tmp_path: Path, tiny_sd3_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tiny_runs(tmp_path, tiny_sd3_folder, logging={"tensorboard": True})
    run = tmp_path / "run"
    assert main(["train", str(runs.config), f"out={run}", runs.rewards(LEAKING)]) == 1
    said = capsys.readouterr()
    assert "SECRET" in said.err
    assert (run / "error.log").is_file()
    assert "SECRET" in (run / "report.html").read_text()
    texts = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert [name for name, text in texts.items() if HIDDEN.encode() in text] == []
    assert HIDDEN not in said.err + said.out
    assert "\x1b" not in said.err + said.out


def test_a_secret_among_the_settings_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_sd3_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tiny_runs(tmp_path, tiny_sd3_folder)
    place = "prompts.train=https://user:hunter2Zq9@host/p.txt"
    assert main(["train", str(runs.config), f"out={tmp_path / 'run'}", place]) == 1
    said = capsys.readouterr().err
    assert "prompts.train holds a password or token (https://SECRET@host/p.txt)" in said
    assert not (tmp_path / "run").exists()


def test_what_a_reward_calls_its_parts_and_errors_is_bounded() -> None:
    assert log_word("status_401") == "status_401"
    assert log_word("geneval/two objects: 50 %") == "geneval/two objects: 50 %"
    assert log_word("a\x1b[2J\n\u202e" + "b" * 100) == "a__2J__" + "b" * 53
    assert log_word("") == "unnamed"
    assert HIDDEN not in log_word("https://u:hunter2Zq9@h")
    words = log_words([f"part {number}" for number in range(5000)])
    assert len(set(words.values())) == MOST_WORDS + 1


def test_whatever_is_printed_goes_through_one_function() -> None:
    """`print` of a module that talks to users is `say`; the others print what is theirs, or to be read by programs."""
    root = Path(__file__).resolve().parents[1]
    own = {
        "scrubbing",
        "failures",
        "interrupts",
        "completion",
        "process_probe",
        "vbench",
        "published",
        "score_server",
    }
    bare = [
        str(path.relative_to(root))
        for folder in ("flowrl", "rewards", "pipelines", "samplers")
        for path in (root / folder).rglob("*.py")
        if re.search(r"(?<![\w.])print\(", text := path.read_text())
        and "import say as print" not in text
        and not {path.stem, path.parent.name} & own
    ]
    assert bare == []
