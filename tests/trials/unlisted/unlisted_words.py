"""Cases: secrets in what others read, and what is printed on a terminal."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from unlisted_case import Case, Outcome, Silent, command, same
from unlisted_folders import runs, train
from unlisted_servers import png

from flowrl.runtime.failures import explain, write_error_log
from flowrl.runtime.scrubbing import printable, without_secrets

# ---- secrets ---------------------------------------------------------------------------------------------------------

S = "Zx9kQ2mV7pLw4Rt8"
_BASIC = base64.b64encode(f"bob:{S}".encode()).decode()
_JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.SflKxwRJSMeKKF2QT4fwpMeJf36P"
_PEM = "-----BEGIN {0}PRIVATE KEY-----\n{1}\n{1}\n-----END {0}PRIVATE KEY-----"
SECRETS: dict[str, str] = {
    "a fragment": f"https://app.example/cb#access_token={S}&state=1",
    "a token alone before @": f"https://{S}@git.example/x.git", "a user without a name": f"redis://:{S}@cache:6379/0",
    "a driver's address": f"mongodb+srv://bob:{S}@c0.example/x?retryWrites=true",
    "a slash in a password": f"https://bob:p/{S}@h/x", "a hash in a password": f"https://bob:p#{S}@h/x",
    "IPv6": f"http://bob:{S}@[::1]:8000/x", "Basic": f"authorization: Basic {_BASIC}",
    "Digest": f'Authorization: Digest username="bob", response="{S}"',
    "AWS4": f"Authorization: AWS4-HMAC-SHA256 Credential=AKIAABCDEFGHIJKLMNOP/2026/s3, SignedHeaders=a, Signature={S}",
    "a cookie": f"Cookie: session={S}; theme=dark", "a set cookie": f"Set-Cookie: sid={S}; Path=/; HttpOnly",
    "cookies of a mapping": repr({"Cookie": f"sessionid={S}; csrf={S}"}),
    "a jar": f"<RequestsCookieJar[<Cookie sid={S} for h/>]>",
    "S3": f"https://s3.example/k?X-Amz-Credential=AKIAABCDEFGHIJKLMNOP%2F2&X-Amz-Signature={S}&X-Amz-Security-Token={S}",
    "GCS": f"https://storage.googleapis.com/b/o?GoogleAccessId=x@y.iam&Expires=1&Signature={S}",
    "Azure": f"https://a.blob.core.windows.net/c/b?sv=2022-11-02&sr=b&sig={S}%3D",
    "Azure's accounts": f"AccountName=a;AccountKey={S}==;EndpointSuffix=x",
    "a bus": f"Endpoint=sb://x.net/;SharedAccessKeyName=Root;SharedAccessKey={S}=",
    "CloudFront": f"https://d1.cloudfront.net/x?Expires=1&Signature={S}~&Key-Pair-Id=APKAABCDEFGHIJKLMNOP",
    "Slack": f"https://hooks.slack.com/services/T0AAAA/B0BBBB/{S}",
    "Discord": f"https://discord.com/api/webhooks/123456789/{S}",
    "Telegram": f"https://api.telegram.org/bot123456789:AA{S}/sendMessage", "JWT": f"claims of {_JWT} expired",
    "JWE": f"got eyJhbGciOiJkaXIiLCJlbmMi..QR1Owv2ug2WyPBnb.{S}.abc", "an OpenSSH key": _PEM.format("OPENSSH ", S),
    "a key of a service account": json.dumps({"private_key": _PEM.format("", S)}),
    "PGP": _PEM.replace("KEY", "KEY BLOCK").format("PGP ", S),
    "colours": f"\x1b[1mpassword\x1b[0m=\x1b[31m{S}\x1b[0m",
    "colours within": f"token is hf_Zx9k\x1b[31m{S}\x1b[0mabcdefgh",
    "encoded twice": f"https://h/?next={quote(quote('https://h/?token=' + S, safe=''), safe='')}",
    "a user encoded three times": f"x={quote(quote(quote(f'https://bob:{S}@h/', safe=''), safe=''), safe='')}",
    "a file's name": f"/data/https%3A%2F%2Fbob%3A{S}%40h%2Fx.png", "YAML": f"hub:\n  token: {S}\n",
    "YAML in quotes": f"password: '{S}'", "a mapping": repr({"token": S, "n": 1}),
    "bytes": repr({b"authorization": f"Bearer {S}".encode()}), "ASGI's headers": repr([(b"x-api-key", S.encode())]),
    "JSON in JSON": json.dumps(json.dumps({"apiKey": S})),
    "camels": json.dumps({"clientSecret": S, "refreshToken": S}),
    "HTML": f"{{&#x27;password&#x27;: &#x27;{S}&#x27;}}",
    "an address in HTML": f"&lt;a href=&quot;https://h/?a=1&amp;token={S}&quot;",
    "a flag": f"tool --api-key {S} -n 3", "curl": f"curl -sS -u bob:{S} https://h/x",
    "export": f'export DB_PASSWORD="{S}"', "netrc": f"machine h login bob password {S}",
    "npm's file": f"//registry.example/:_authToken={S}", "PyPI": f"pypi-AgEIcHlwaS5vcmcCJ{S}{S} refused",
    "npm": f"npm_{S}{S}abcd refused", "Stripe": f"sk_live_{S}abcd",
    "SendGrid": f"SG.{S}abcdef.{S}abcdefghijklmnopqrstuvw", "Google": f"ya29.{S}abcdefghijk",
    "Anthropic": f"sk-ant-api03-{S}-{S}", "Replicate": f"r8_{S}abcdefghijklmnopqrstu",
    "ODBC": f"Driver=x;Uid=bob;Pwd={S};", "JDBC": f"jdbc:postgresql://h/x?user=bob&password={S}",
    "a sentence": f"Incorrect API key provided: {S}. You can", "a passphrase": f"passphrase={S}",
    "a call": f"connect(host='h', password='{S}')",
    "git": f"fatal: could not read Password for 'https://{S}@github.com'",
}  # fmt: skip
PLAIN: tuple[str, ...] = (
    "commit 0123456789abcdef0123456789abcdef01234567",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "data:image/png;base64," + base64.b64encode(png(9, 9)).decode(), "/data/token_counts/tokenizer.json",
    "keyboard: mechanical", "secret = garden", "the secret: a garden", "a password: swordfish", "token: 512",
    "max_token=77", "pad_token_id: 49407", "pad_token='<|endoftext|>'", "bos_token: <s>", "primary_key=id",
    "state_dict key: transformer.blocks.0.attn.to_q.weight", "mailto:bob@example.com", "16:9@30",
    "signature=(int, float)", "pass=3 fail=2", "auth=basic", "a bearer of bad news in 2024", "sk-learn is old",
    "hf_hub_download", "session: 2026-01-01", "cookie: chocolate chip", "a cookie=shaped star", "chown -u 1000:1000",
    "passphrase: none", "user/image@sha256:abcdef0123456789abcdef0123456789", "policy: lora rank 4",
    "key: StableDiffusion3Pipeline", "http://127.0.0.1:8190/v1/score",
    "a secretary, tokens of love, and a turnkey house; 4k", "model.layers.0.k_proj.weight",
    "a photo of a hotel key card, room 1408",
)  # fmt: skip


def hidden(name: str, text: str) -> Case:
    """A text with a secret, as an error says it, a cause, a note, a group of errors, and the log of a run keep it."""

    def run(folder: Path) -> Outcome:
        try:
            try:
                raise OSError(5, text, f"/tmp/{text}")
            except OSError as cause:
                cause.add_note(f"note: {text}")
                raise ExceptionGroup(f"several: {text}", [RuntimeError(text), ValueError(text)]) from cause
        except ExceptionGroup as error:
            log = write_error_log(folder, error)
            assert log is not None
            shown = {"log": log.read_text(), "words": explain(error), "text": without_secrets(text)}
        for where, said in shown.items():
            if S in said or S[:10] in said or _BASIC in said or _JWT in said:
                raise Silent(f"in {where}: {said[-300:]}")
        return "right", shown["text"][:200]

    return Case(f"words: a secret, {name}", run)


def kept(text: str) -> Case:
    """A text that looks a little like one that holds a secret."""
    return Case(f"words: no secret, {text[:40]}", lambda folder: same(without_secrets(text), text))


def prompts_stay(folder: Path) -> Outcome:
    """Prompts are data: those that look like secrets are trained on to the letter."""
    words = [
        f"a sign that says password: {S}",
        "token=hunter2",
        "https://me:pw1@host on a wall",
        "AKIAABCDEFGHIJKLMNOP",
    ]
    (folder / "prompts.txt").write_text("\n".join(words) + "\n")
    text = (runs() / "toy.yaml").read_text().replace(str(runs() / "prompts.txt"), str(folder / "prompts.txt"))
    (folder / "own.yaml").write_text(text)
    given = ("eval_every=3", f"prompts.eval={folder / 'prompts.txt'}", "eval.num_images=4")
    code, said = train(str(folder / "own.yaml"), f"out={folder / 'run'}", *given)
    if code:
        raise Silent(f"refused: {said[-300:]}")
    told = (folder / "run/samples/prompts.json").read_text()
    return same([word for word in words if json.dumps(word) not in told], [], "prompts that changed")


def environment(folder: Path) -> Outcome:
    """Values of variables that are called a secret, wrapped by a terminal's width or in capitals of a header."""
    os.environ["UNLISTED_API_KEY"] = "correct-horse-battery-staple"
    try:
        value = "correct-horse-battery-staple"
        said = without_secrets(f"header: {value}, quoted {value}%20, [{value}], {value!r}, {value}{value}")
    finally:
        del os.environ["UNLISTED_API_KEY"]
    return same("horse" in said, False)


# ---- printing --------------------------------------------------------------------------------------------------------

ACTS: dict[str, str] = {
    "a colour": "\x1b[31mred", "a link of OSC 8": "\x1b]8;;http://evil.example\x1b\\here\x1b]8;;\x1b\\",
    "a bell": "a\x07b", "a title": "\x1b]0;owned\x07", "a carriage return": "safe\rEVIL",
    "backspaces": "rm\x08\x08ls", "a turn of direction": "a\u202etxt.exe", "isolates": "\u2066a\u2069",
    "a C1 control": "\x9b31mred", "half a character": "a\udcff\ud800", "a form feed": "a\x0cb", "a delete": "a\x7fb",
    "a line separator": "a\u2028b", "a tag": "a\U000e0041b", "a soft hyphen": "pass\xadword",
    "zero width": "pay\u200bpal", "a null": "a\0b", "an answer back": "\x05", "a Mongolian separator": "a\u180eb",
    "a Hangul filler": "a\u3164b", "an interlinear mark": "a\ufff9b",
}  # fmt: skip
HARMLESS = {"a tag", "a soft hyphen", "zero width", "a Mongolian separator", "a Hangul filler"}
"""Letters that are not seen and move nothing: scripts are written with some of them."""


def printed(name: str, text: str) -> Case:
    """A text of somebody else on the terminal, in an error and in the names of files."""

    def run(folder: Path) -> Outcome:
        bad = {letter for letter in text if not letter.isprintable() and name not in HARMLESS}
        for said in (
            printable(text),
            explain(ValueError(f"x {text}")),
            command("train", f"no-such-{text}.yaml".replace("\0", "0"))[1],
        ):
            if left := [letter for letter in bad if letter in said and letter not in "\n\t"]:
                raise Silent(f"{left} reach the terminal: {said!r:.200}")
        return "right", repr(printable(text))

    return Case(f"words: printed, {name}", run)


PASTED: tuple[str, ...] = (
    "a b", "a'b", 'say "hi"', "$(touch owned)", "`touch owned`", "a;touch owned", "a\\nb", "!history", "-dash", "~",
    "*", "a&b", "\u201cquotes\u201d", "a # b", "{a,b}",
)  # fmt: skip


def pasted(folder: Path) -> Outcome:
    """Commands that a run prints, pasted into a shell: each word is the one that was meant, and nothing else runs."""
    for number, prompt in enumerate(PASTED):
        place = folder / f"{number} {prompt.replace('/', '')}"
        (folder / "p.txt").write_text(prompt + "\n")
        text = (
            (runs() / "toy.yaml")
            .read_text()
            .replace(str(runs() / "prompts.txt"), str(folder / "p.txt"))
            .replace("num_iterations: 3", "num_iterations: 1")
        )
        (folder / "own.yaml").write_text(text.replace("prompts_per_step: 2", "prompts_per_step: 1"))
        code, said = train(str(folder / "own.yaml"), f"out={place}")
        if code:
            raise Silent(f"{prompt!r} refused: {said[-300:]}")
        shown = said[said.index("flowrl sample") :].replace("flowrl sample", "printf '%s\\n'", 1)
        lines = subprocess.run(
            ["bash", "-c", shown.split("\n\n")[0]], cwd=folder, capture_output=True, text=True, check=False
        ).stdout.split("\n")
        if str(place) not in lines or prompt not in lines or (folder / "owned").exists():
            raise Silent(f"{prompt!r} becomes {lines}: {shown!r:.300}")
    return "right", f"{len(PASTED)} prompts"


def cases() -> Iterator[Case]:
    """Every case of this file."""
    for name, text in SECRETS.items():
        yield hidden(name, text)
    for text in PLAIN:
        yield kept(text)
    yield Case("words: prompts that look like secrets", prompts_stay)
    yield Case("words: values of variables", environment)
    for name, text in ACTS.items():
        yield printed(name, text)
    yield Case("words: commands that are pasted", pasted)
