"""What is written and printed for others to read: without secrets, and without what acts on a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from flowrl.runtime.call import shown

SECRET = "SECRET"
"""What stands where a secret stood."""
_SECRET_VARIABLES = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")  # ends of names
_SHORTEST = 8  # letters of a variable's value that is looked for: a shorter one occurs in other words
_START = r"(?:(?<![A-Za-z0-9_])|(?<=%[0-9A-Fa-f]{2}))"  # of a word, in an encoded address too
_FIRST = r"(?:(?<![\w-])-{0,2}|(?<=%[0-9A-Fa-f]{2}))"  # of a name with whatever is before it
_KEYS = r"(?:api|access|account|auth|license|master|private|secret|shared|signing|storage)"
_NAMES = (
    r"(?:(?:access|auth|api|bearer|github|hf|hub|id|private|refresh|secret|security|session|user|wandb)[_-]?)?token"
    rf"|[\w-]{{0,40}}?{_KEYS}[_-]?key(?:[_-]?id)?|[\w-]{{0,40}}?(?:secret|passw(?:or)?d|pwd|passphrase)"
    r"|(?-i:[A-Z][A-Z0-9_]{0,60}?_(?:TOKEN|KEY))|client[_-]secret|credentials?"
)
_SAID = (
    rf"(?:[\w-]{{0,40}}?(?:{_KEYS}[ _-]?key|token|secret|passw(?:or)?d|pwd|passphrase|credentials?))"
    r"(?:\s+(?:given|header|is|provided|used|value|was))?"
)
"""What sentences, flags and lists call a secret: only what looks like one is left out after such a word."""
_BETWEEN = (
    r"(?:b?\\?['\"]|[ \t:=,;(\[<>{|\uff1a\uff1d]|\\[\\nt]|&\#(?:x27|39|34);|&quot;|%(?:25){0,4}(?:20|22|27)){1,9}"
)
_RANDOM = (
    r"(?:(?=[a-z0-9+/=~_-]{0,300}?[A-Z])(?=[A-Z0-9+/=~_-]{0,300}?[a-z])(?=[A-Za-z+/=~_-]{0,300}?[0-9])"
    r"[\w+/=~-]{10,}|(?=[A-Za-z]{0,300}[0-9])(?=[0-9]{0,300}[A-Za-z])[A-Za-z0-9]{16,})"
)
_EQUALS, _COLON, _AND = r"(?:=|%(?:25){0,4}3[Dd])", r"(?::|%(?:25){0,4}3[Aa])", r"(?:[?&;]|%(?:25){0,4}(?:3[Ff]|26))"
_SLASH, _AT = r"(?:\\?/|%(?:25){0,4}2[Ff])", r"%(?:25){0,4}40"
_VALUE = (
    r"(?!(?:[Nn]one|null|true|false|True|False|TOKEN|SECRET)\b|[$<{*]|%(?:25){0,4}3[Dd])"
    r"(?:(?!%(?:25){0,4}26)[^\s'\"&,;<>)\]}\\])+"
)
_FORMS, _HOOKS = (
    "|".join(line for line in part.splitlines() if not line.startswith("#"))
    for part in Path(__file__).with_name("secret_forms.txt").read_text(encoding="utf-8").split("\n\n")
)
"""Patterns of tokens that are known by their form, and of addresses whose path is the secret."""
_SHAPES = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----[\s\S]*?"
         r"(?:-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|\Z)", SECRET),
        (rf"({_HOOKS})[^\s'\"<>]+", rf"\1{SECRET}"),
        # user:password@ of an address; the last @ before its path, as passwords may hold one, and a slash where what
        # follows the colon is no port
        (rf"(?<=[A-Za-z0-9])({_COLON}(?:(?<=https:)|(?<=http:)|{_SLASH}){_SLASH})(?!git@)"
         r"[^\s/\\?#'\"<>]{1,300}@", rf"\1{SECRET}@"),
        (r"(?<=[A-Za-z0-9]:)(//)[^\s/\\?#'\"<>:@]{1,100}:(?!\d{1,5}(?:[/?#\s]|$))[^\s'\"<>@]{1,200}@", rf"\1{SECRET}@"),
        (rf"({_COLON}{_SLASH}{{2}})(?:(?!{_SLASH})[^\s/\\?#'\"<>&@]){{1,300}}({_AT})", rf"\1{SECRET}\2"),
        (r"(\b(?:curl|wget|https?)\b[^\n]{0,300}?\s(?:-u|--user|--proxy-user)[\s=]*['\"]?)[^\s:'\"]{1,100}:[^\s'\"]+",
         rf"\1{SECRET}"),
        # a query's token
        (rf"({_AND}(?i:{_NAMES}|key|sig(?:nature)?|auth|pass|jwt|\w{{0,20}}access_?key_?id|x-(?:amz|goog)-[\w-]+)"
         rf"{_EQUALS}){_VALUE}", rf"\1{SECRET}"),
        # cookies, and Authorization with parameters, up to the end of the line
        (r"(?i)((?:set-)?cookie\\?['\"]?(?:\s*[:=,]\s*|\s)b?\\?['\"]?)(?=[\w.-]{1,100}=)[^\n'\"]+", rf"\1{SECRET}"),
        (r"(?i)((?:proxy-)?authorization\\?['\"]?\s*[:=,]\s*b?\\?['\"]?(?:aws4-[\w-]+|digest|hawk|hmac[\w-]*|oauth"
         r"|signature|sharedkey\w*)\s+)(?=[\w]+=)[^\n]+", rf"\1{SECRET}"),
        # Authorization: Bearer ..., and a bearer's token without its header
        (r"(?i)((?:proxy-)?authorization\\?['\"]?\s*[:=,]\s*b?\\?['\"]?(?:bearer|basic|token|digest|apikey|key|negotiate"
         rf"|ntlm|oauth)(?:\s+|%20|\+)){_VALUE}", rf"\1{SECRET}"),
        (r"\b([Bb]earer(?:\s+|%20))(?=[\w.~+/-]{0,300}\d)[\w.~+/=-]{8,}", rf"\1{SECRET}"),
        # name=value, "name": "value"; name = value and name: value where the value has a digit
        (rf"({_FIRST}(?i:{_NAMES})\\?['\"]?{_EQUALS}\\?['\"]?)(?!\d{{1,5}}\b){_VALUE}", rf"\1{SECRET}"),
        (rf"({_FIRST}(?i:{_NAMES})\\?['\"]\s*:\s*b?\\?['\"]){_VALUE}", rf"\1{SECRET}"),
        (rf"({_FIRST}(?i:{_NAMES})\\?['\"]?\s?=\s?\\?['\"]?)(?=\S{{0,300}}\d)(?!\d{{1,5}}\b){_VALUE}", rf"\1{SECRET}"),
        (rf"({_FIRST}(?i:x-[\w-]{{0,40}}(?:key|token|secret)|(?:api|access|secret)[_-]key|passw(?:or)?d"
         rf"|(?:access|auth)[_-]token)\s*:\s+['\"]?)(?=\S{{0,300}}\d)(?!\d+\b){_VALUE}", rf"\1{SECRET}"),
        (rf"(?=[a-zAES1]){_START}(?:{_FORMS})", SECRET),
        (rf"({_FIRST}(?i:{_SAID}){_BETWEEN}){_RANDOM}", rf"\1{SECRET}"),
        (r"(?i)((?:api[_ -]?key|wandb|login)(?:\W{1,4}|\s+is\s+|\W+(?:api\W?)?key\W{1,4}|\W+login\W{1,3}))(?:local-)?"
         r"[0-9a-f]{40}\b", rf"\1{SECRET}"),
    )
)  # fmt: skip
_HINTS = re.compile(
    r"[@=]|%(?:25){0,4}[34]|bearer|authorization|token|key|secret|passw|passphrase|pwd|credential|cookie|login|wandb"
    r"|curl|wget|https?\b|hooks|telegram|(?:hf|live|test|gh[pousr]|pat|npm|r8|gsk|rpa|csk|v1|shp..)_|1//0|eyJ|dapi"
    r"|(?:sk|gl...?|xox.|xapp|pypi|nvapi|xai|pplx)-|(?:ya29|SG|hvs)\.|A[KS]IA|AIza|SK[0-9a-f]",
    re.IGNORECASE,
)
"""One of these is in whatever the shapes find."""
_COLOURS = re.compile(r"(?:\x1b|\\x1b|\\033|\\u001b)\[[0-9;:]*m")
_SECRET_SETTINGS = re.compile(rf"(?:{_NAMES})\Z", re.IGNORECASE)
_remembered: set[str] = set()


def remember_secret(value: str) -> None:
    """A secret that was read from where its user named it: `without_secrets` knows it from now on."""
    if len(value) >= _SHORTEST:
        _remembered.add(value)


def without_secrets(text: str) -> str:
    """A text without passwords, tokens and keys, for whatever others may read: logs, pages, manifests, the terminal.

    Known are passwords in addresses, tokens in queries and headers, `name=value` of such names, tokens of a known form
    (`hf_`, `sk-`, `ghp_`, `AKIA`, ...), also percent-encoded, and the values of environment variables that are called
    a token, key, secret or password.
    """
    return _without(_secrets() if len(text) >= _SHORTEST else (), text)  # most cells of a page are shorter


def settings_without_secrets(value: Any) -> Any:
    """The same of all texts in nested settings; what its name calls a token or password is left out as a whole."""
    return _settings_without(_secrets(), value)


def _settings_without(secrets: tuple[str, ...], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: SECRET
            if isinstance(part, str) and part and _SECRET_SETTINGS.match(str(name))
            else _settings_without(secrets, part)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_settings_without(secrets, part) for part in value]
    return _without(secrets, value) if isinstance(value, str) else value


def _secrets() -> tuple[str, ...]:  # read once a document: that takes longer than replacing them
    of_names = {os.environ[name].strip() for name in os.environ if name.upper().endswith(_SECRET_VARIABLES)}
    return _as_written(frozenset(value for value in of_names | _remembered if len(value) >= _SHORTEST))


@lru_cache(maxsize=1024)
def _without(secrets: tuple[str, ...], text: str) -> str:  # the settings of a run are written several times
    plain = _COLOURS.sub("", text) if "[" in text else text
    if plain != text and (cleared := _without(secrets, plain)) != plain:
        return cleared  # colours may stand in the midst of a secret
    for value in secrets:
        text = text.replace(value, SECRET)
    for shape, by in _SHAPES if _HINTS.search(text) else ():  # most texts have none
        text = shape.sub(by, text)
    return text


@cache
def _as_written(values: frozenset[str]) -> tuple[str, ...]:
    """Secrets by their exact words, longest first, as they are and as addresses hold them."""
    known = {value for value in values if not os.path.exists(value)}  # the place of a key is none
    return tuple(sorted(known | {quote(value, safe="") for value in known}, key=len, reverse=True))


_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufff9-\ufffb]"
)
"""Characters that move a cursor, colour a terminal, or turn text round; lines and tabs are none of them."""


def printable(text: str) -> str:
    """A text whose control characters, escape sequences and turns of direction are written out: `\\x1b`, `\\u202e`."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: str, most: int = 200) -> str:
    """What a stranger said as one printable line without secrets, cut at `most` letters."""
    flat = printable(without_secrets(" ".join(text.split())))
    return flat if len(flat) <= most else f"{flat[: most - 3]}..."


def say(*words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print` for others' words: without secrets, and nothing acts on the terminal; `show=False` prints nothing."""
    if shown():
        print(printable(without_secrets(" ".join(map(str, words)))), end=end, file=file, flush=flush)
