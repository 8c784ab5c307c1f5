"""Regular expressions and EBNF of clients, written so that XGrammar keeps to them.

XGrammar 0.2.7 splits some ranges of characters wrongly, takes a negated class with characters
beyond ASCII for one without them, and ignores some constructs with a warning. Classes are written
as ranges that XGrammar splits correctly. A construct that would be ignored is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from string import hexdigits

Ranges = list[tuple[int, int]]  # of code points, both ends included

_POINT_MAX = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
# The first code point of each length in UTF-8, and where surrogates begin and end.
_STARTS = (0x80, 0x800, 0xD800, 0xE000, 0x10000)
_ESCAPE = (
    r"\\u\{[0-9A-Fa-f]{1,6}\}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\."
)
_CLASS = r"\[(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)"  # one without an end is not looked at twice
_QUANTIFIER = r"(?:[*+?]|\{\d+(?:,\d*)?\})\??"
_REGEX = re.compile(rf"{_ESCAPE}|{_CLASS}|\(\?(?:<?[=!]|:|P?<\w+>)|{_QUANTIFIER}|.", re.DOTALL)
_STRING = r'"(?:[^"\\\n]|\\.)*+"?'  # likewise
_EBNF = re.compile(
    rf"(?P<regex>(?<![\w-])Regex\s*\(\s*)(?P<text>{_STRING})|(?P<string>{_STRING})|\#[^\n]*|"
    rf"(?P<class>{_CLASS})",
    re.DOTALL,
)
_CARET = ord("^")
_ITEM = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_LETTERS = {"0": 0, "a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27}
_DIGITS = [(0x30, 0x39)]
_WORDS = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
# As ECMA 262 has them.
_SPACES = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
# Letters and digits that XGrammar knows after a backslash, or refuses by itself.
_KNOWN = frozenset("dDwWsSbBtnvfrae0123456789")
# Characters that JSON escapes in a string.
_ESCAPED = [*range(1, 0x20), ord('"'), ord("\\")]
# Classes of their own.
_AS_CLASS = {
    ".": r"[^\n]", r"\D": r"[^\d]", r"\S": r"[^\s]", r"\s": r"[\s]", r"\W": r"[^\w]",
}  # fmt: skip
# In a group that is repeated by numbers, XGrammar lets the former match nothing.
_AS_MARK = {"{0,}": "*", "{0,}?": "*?", "{1,}": "+", "{1,}?": "+?"}
_AHEAD = {"(?=": "lookahead", "(?!": "lookahead", "(?<=": "lookbehind", "(?<!": "lookbehind"}


def kept_regex(text: str, json_string: bool = False) -> str:
    """Returns the same regular expression as XGrammar has to be given it. `json_string`: it matches
    what a JSON string says, and not how it is written. Raises RuntimeError, as XGrammar does."""
    tokens = _REGEX.findall(text)
    if error := _unkept(tokens):
        raise RuntimeError(f"{error} is not kept in the regular expression {text!r:.100}")
    kept = [_kept_atom(token, json_string) for token in tokens]
    for at in range(1, len(kept) if json_string else 0):
        # XGrammar ends an optional group of a pattern within a loop that the group begins with.
        if kept[at - 1] == ")" and kept[at] in ("?", "??"):
            kept[at] = "{0,1}"
    return "".join(kept)


def kept_ebnf(text: str) -> str:
    """Returns the same grammar as XGrammar has to be given it. Raises RuntimeError, as XGrammar
    does."""
    return _EBNF.sub(_kept_part, text)


def class_of(ranges: Ranges) -> str:
    """Returns a class of characters whose ranges XGrammar splits correctly."""
    if ranges == [(_CARET, _CARET)]:
        return r"\^"
    pieces = [piece for low, high in ranges for piece in _pieces(low, high)]
    # XGrammar prints \x1f before a digit, and reads both as one escape: digits come first.
    pieces.sort(key=lambda piece: chr(piece[0]) not in hexdigits)
    # It prints a class that begins with this character as a negated one.
    if pieces[0][0] == _CARET:
        pieces = [(_CARET + 1, pieces[0][1]), *pieces[1:], (_CARET, _CARET)]
    return f"[{''.join(_written(low, high) for low, high in pieces if low <= high)}]"


def _unkept(tokens: list[str]) -> str:
    """Returns the first construct that XGrammar would ignore or read otherwise; empty: none."""
    for before, token in zip(["", *tokens], tokens, strict=False):
        if token in _AHEAD:
            return f"a {_AHEAD[token]} {token}...)"
        if re.fullmatch(_QUANTIFIER, token) and re.fullmatch(_QUANTIFIER, before):
            return f"{before}{token} (a possessive or a repeated quantifier)"
        if before == r"\0" and token.isdecimal():
            return f"the escape {before}{token}"
        if error := _unknown_escape(token):
            return error
    if _anchor_inside(tokens, "^") or _anchor_inside(tokens[::-1], "$"):
        return "an anchor (^ or $) within the text"
    return ""


def _unknown_escape(token: str) -> str:
    if re.search(r"(?<!\\)\[:", token[1:]) and token.endswith(":]"):
        return f"a POSIX class {token}]"
    for item in _ITEM.findall(token) if token.startswith("[") else [token]:
        letter = item[1:]
        if len(item) == 2 and item[0] == "\\" and letter.isascii() and letter.isalnum():
            if letter not in _KNOWN or (token.startswith("[") and letter in "B123456789"):
                return f"the escape {item}"
        elif item[:2] in ("\\u", "\\U") and _SURROGATES[0] <= _point(item) <= _SURROGATES[1]:
            return f"half of a surrogate pair, {item},"
    return ""


def _anchor_inside(tokens: list[str], anchor: str) -> bool:
    """Returns whether text may come before an anchor; tokens are reversed for the end's anchor."""
    opening, closing = ("(", ")") if anchor == "^" else (")", "(")
    starts: list[bool] = []
    at_start = True
    for token in tokens:
        if token == anchor:
            if not at_start:
                return True
        elif token.startswith(opening):
            starts.append(at_start)
        elif token.startswith(closing):
            at_start = False
            del starts[-1:]
        elif token == "|":
            at_start = starts[-1] if starts else True
        else:
            at_start = False
    return False


def _kept_atom(token: str, json_string: bool) -> str:
    token = _AS_CLASS.get(token, _AS_MARK.get(token, token))
    if token.startswith("["):
        return _kept_class(token, json_string)
    if token.startswith(r"\U"):
        token = re.escape(chr(_point(token)))
    is_character = token != r"\b" and (len(token) == 1 or token.startswith("\\"))
    if json_string and is_character and _point(token) in _ESCAPED:
        return f"(?:{_in_json(_point(token))})"  # XGrammar lets it stand in the string as it is
    return _long_escapes(token)


def _in_json(point: int) -> str:
    return re.escape(json.dumps(chr(point))[1:-1])


def _long_escapes(text: str) -> str:
    r"""Returns the same text with \u0041 for \x41, which XGrammar takes for one with more digits if
    such digits follow."""
    items = _ITEM.findall(text)
    return "".join(
        rf"\u00{item[2:]}" if item.startswith(r"\x") and len(item) == 4 else item for item in items
    )


def _kept_part(found: re.Match[str]) -> str:
    if found["class"]:
        kept = _kept_class(found["class"])
        return '"^"' if kept == r"\^" else kept
    if found["string"]:
        return _long_escapes(found["string"])
    if found["regex"]:
        inner = "".join(chr(_point(item)) for item in _ITEM.findall(found["text"][1:-1]))
        return f"{found['regex']}{json.dumps(kept_regex(inner), ensure_ascii=False)}"
    return found[0]


@lru_cache(maxsize=1024)
def _kept_class(text: str, json_string: bool = False) -> str:
    """Returns the same class; text of one that XGrammar keeps to is left as it is. In a JSON string
    it has escapes of characters that it names, and no character that has to be escaped."""
    if not text.endswith("]"):
        return text  # XGrammar refuses it
    negated = text.startswith("[^")
    ranges = _ranges(text[1 + negated : -1])
    kept = _complement([(0, 0), _SURROGATES, *(ranges if negated else _complement(ranges))])
    if not kept:
        raise RuntimeError(f"no character matches {text:.100}")
    escaped = [point for point in _ESCAPED if json_string and _has(kept, point)]
    if not escaped and _is_kept(ranges, negated) and not text.startswith(r"[\^"):
        return _long_escapes(text)
    plain = _complement([*_complement(kept), *((point, point) for point in escaped)])
    choices = [class_of(plain)] if plain else []
    choices += [] if negated and plain else [_in_json(point) for point in escaped]
    return choices[0] if len(choices) == 1 and plain else f"(?:{'|'.join(choices)})"


def _is_kept(ranges: Ranges, negated: bool) -> bool:
    """Returns whether XGrammar keeps to a class with these characters: of ASCII alone, or with all
    others."""
    if all(high < _STARTS[0] for _, high in ranges):
        return True
    return not negated and any(low <= _STARTS[0] and high == _POINT_MAX for low, high in ranges)


def _has(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)


def _ranges(body: str) -> Ranges:
    """Returns what stands between a class's brackets, in order and without overlaps."""
    items = _ITEM.findall(body)[::-1]
    found: Ranges = []
    while items:
        item = items.pop()
        if len(item) == 2 and item[0] == "\\" and item[1].lower() in _SETS:
            ranges = _SETS[item[1].lower()]
            found += ranges if item[1].islower() else _complement(ranges)
            continue
        low = high = _point(item)
        if len(items) > 1 and items[-1] == "-":
            items.pop()
            high = _point(items.pop())
        if high < low:
            raise RuntimeError(f"the range of characters {chr(low)!r}-{chr(high)!r} is reversed")
        found.append((low, high))
    return _complement(_complement(found))


def _complement(ranges: Ranges) -> Ranges:
    gaps: Ranges = []
    start = 0
    for low, high in sorted(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = max(start, high + 1)
    return [*gaps, (start, _POINT_MAX)] if start <= _POINT_MAX else gaps


def _pieces(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yields parts whose last bytes in UTF-8 are either equal or all that there are."""
    for start in _STARTS:
        if low < start <= high:
            yield from _pieces(low, start - 1)
            yield from _pieces(start, high)
            return
    for mask in (0x3F, 0xFFF, 0x3FFFF) if high >= _STARTS[0] else ():
        if low & ~mask == high & ~mask:
            break
        if low & mask:
            yield from _pieces(low, low | mask)
            yield from _pieces((low | mask) + 1, high)
            return
        if high & mask != mask:
            yield from _pieces(low, (high & ~mask) - 1)
            yield from _pieces(high & ~mask, high)
            return
    yield low, high


def _written(low: int, high: int) -> str:
    ends = [low] if low == high else [low, high]
    return "-".join(chr(p) if p >= _STARTS[0] else f"\\u{p:04x}" for p in ends)


def _point(item: str) -> int:
    """Returns the code point that a character or its escape stands for."""
    if len(item) == 1:
        return ord(item)
    if len(item) > 2:
        digits = item[2:].strip("{}")
        return ord(digits.upper()) - 0x40 if item[1] == "c" else int(digits, 16)
    return _LETTERS.get(item[1], ord(item[1]))
