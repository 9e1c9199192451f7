"""What a text is: characters that a reader sees, and none that belong to terminals or to the encoding of a file.

Allowed are characters that are not seen but shape the text around them: joiners of emoji and of Persian or Indic
letters, marks of writing direction, zero-width spaces. Published lists of prompts hold them.
"""

from __future__ import annotations

import re
import unicodedata

LONGEST = 20_000
"""Characters of a prompt: more are a file of another kind."""

# Control characters but tab, line feed, carriage return and next line; halves of characters; no characters at all.
_STRANGE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_SEEN = re.compile(r"[!-~]")
_UNSEEN = ("Cc", "Cf", "Cs", "Zs", "Zl", "Zp", "Mn", "Mc", "Me")  # marks need a letter to stand on
_BLANKS = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # letters and a symbol that are drawn as nothing


def check_text(text: str, where: str = "") -> None:
    """Refuses a prompt that is no text.

    Args:
        where: file and line, for messages; without, the beginning of the text is named.

    Raises ValueError: control characters but tabs and line breaks, halves of characters, a byte order mark at the
    beginning, nothing that is seen, or more than `LONGEST` characters.
    """
    where = where or repr(text[:40])
    if (strange := _STRANGE.search(text)) is not None:
        kinds = {"Cs": "half a character", "Cn": "a code without a character"}
        kind = kinds.get(unicodedata.category(strange[0]), "a control character")
        raise ValueError(
            f"{where}: the prompt holds U+{ord(strange[0]):04X} at place {strange.end()}, {kind}, which no text has: "
            "delete it, or save the file as UTF-8 text if it is of another kind"
        )
    if text.lstrip().startswith("\ufeff"):
        raise ValueError(
            f"{where}: the prompt begins with U+FEFF, the byte order mark of a file that was joined to another: delete "
            "this character"
        )
    seen = _SEEN.search(text) is not None
    if not seen and not any(unicodedata.category(char) not in _UNSEEN and char not in _BLANKS for char in text):
        listed = ", ".join(dict.fromkeys(f"U+{ord(char):04X}" for char in text if not char.isspace()))
        raise ValueError(
            f"{where}: the prompt has nothing that is seen ({listed or 'only space'}): write it, or delete the line"
        )
    if len(text) > LONGEST:
        raise ValueError(
            f"{where}: a prompt of {len(text)} characters; {LONGEST} are the most, and text encoders read far fewer: "
            "are line breaks missing?"
        )
