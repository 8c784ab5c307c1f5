"""Rewriting of clients' regular expressions and EBNF, so that XGrammar enforces them.

XGrammar 0.2.7 splits some ranges of characters wrongly, ignores non-ASCII characters in a negated
class, and ignores some constructs with a warning. Classes are rewritten as ranges that XGrammar
splits correctly. A construct that would be ignored is an error.
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
# First code point of each length in UTF-8, first surrogate, and first code point after surrogates.
_STARTS = (0x80, 0x800, 0xD800, 0xE000, 0x10000)
_ESCAPE = (
    r"\\u\{[0-9A-Fa-f]{1,6}\}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\x[0-9A-Fa-f]{2}|\\c[A-Za-z]|\\."
)
_CLASS = r"\[(?:[^\]\\]|\\.)*+(?:\]|\\?\Z)"  # matches also a class without an end: no backtracking
_QUANTIFIER = r"(?:[*+?]|\{\d+(?:,\d*)?\})\??"
_REGEX = re.compile(rf"{_ESCAPE}|{_CLASS}|\(\?(?:<?[=!]|:|P?<\w+>)|{_QUANTIFIER}|.", re.DOTALL)
_STRING = r'"(?:[^"\\\n]|\\.)*+"?'  # matches also a string without an end
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
# White space in ECMA 262.
_SPACES = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
# Letters and digits after a backslash that XGrammar supports, or rejects itself.
_KNOWN = frozenset("dDwWsSbBtnvfrae0123456789")
# Characters that JSON escapes in a string.
_ESCAPED = [*range(1, 0x20), ord('"'), ord("\\")]
# Tokens that are rewritten as a class.
_AS_CLASS = {
    ".": r"[^\n]", r"\D": r"[^\d]", r"\S": r"[^\s]", r"\s": r"[\s]", r"\W": r"[^\w]",
}  # fmt: skip
# Quantifiers that are rewritten: within a group with a numeric quantifier, XGrammar lets the first
# form match nothing.
_AS_MARK = {"{0,}": "*", "{0,}?": "*?", "{1,}": "+", "{1,}?": "+?"}
_AHEAD = {"(?=": "lookahead", "(?!": "lookahead", "(?<=": "lookbehind", "(?<!": "lookbehind"}


def rewrite_regex(text: str, json_string: bool = False) -> str:
    """Returns an equivalent regular expression that XGrammar enforces. Raises RuntimeError, like
    XGrammar, if there is none.

    Args:
        json_string: True if it matches the decoded value of a JSON string.
    """
    tokens = _REGEX.findall(text)
    if error := _unsupported(tokens):
        raise RuntimeError(f"{error} is not supported in the regular expression {text!r:.100}")
    atoms = [_rewrite_atom(token, json_string) for token in tokens]
    for at in range(1, len(atoms) if json_string else 0):
        # In a pattern XGrammar ends an optional group inside of a loop at the group's start.
        if atoms[at - 1] == ")" and atoms[at] in ("?", "??"):
            atoms[at] = "{0,1}"
    return "".join(atoms)


def rewrite_ebnf(text: str) -> str:
    """Returns an equivalent grammar that XGrammar enforces. Raises RuntimeError, like XGrammar, if
    there is none."""
    return _EBNF.sub(_rewrite_part, text)


def class_of(ranges: Ranges) -> str:
    """Returns a class of characters whose ranges XGrammar splits correctly."""
    if ranges == [(_CARET, _CARET)]:
        return r"\^"
    pieces = [piece for low, high in ranges for piece in _pieces(low, high)]
    # XGrammar prints \x1f before a digit and parses both as one escape, so digits are first.
    pieces.sort(key=lambda piece: chr(piece[0]) not in hexdigits)
    # XGrammar prints a class that begins with this character as a negated class.
    if pieces[0][0] == _CARET:
        pieces = [(_CARET + 1, pieces[0][1]), *pieces[1:], (_CARET, _CARET)]
    return f"[{''.join(_written(low, high) for low, high in pieces if low <= high)}]"


def _unsupported(tokens: list[str]) -> str:
    """Returns the first construct that XGrammar would ignore or misread, empty if none."""
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
    """Returns whether text may precede an anchor. For "$" the tokens are reversed."""
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


def _rewrite_atom(token: str, json_string: bool) -> str:
    token = _AS_CLASS.get(token, _AS_MARK.get(token, token))
    if token.startswith("["):
        return _rewrite_class(token, json_string)
    if token.startswith(r"\U"):
        token = re.escape(chr(_point(token)))
    is_character = token != r"\b" and (len(token) == 1 or token.startswith("\\"))
    if json_string and is_character and _point(token) in _ESCAPED:
        return f"(?:{_in_json(_point(token))})"  # XGrammar would not escape it
    return _long_escapes(token)


def _in_json(point: int) -> str:
    return re.escape(json.dumps(chr(point))[1:-1])


def _long_escapes(text: str) -> str:
    r"""Returns the text with \u0041 for \x41, in which XGrammar would include following hex
    digits."""
    items = _ITEM.findall(text)
    return "".join(
        rf"\u00{item[2:]}" if item.startswith(r"\x") and len(item) == 4 else item for item in items
    )


def _rewrite_part(found: re.Match[str]) -> str:
    if found["class"]:
        rewritten = _rewrite_class(found["class"])
        return '"^"' if rewritten == r"\^" else rewritten
    if found["string"]:
        return _long_escapes(found["string"])
    if found["regex"]:
        inner = "".join(chr(_point(item)) for item in _ITEM.findall(found["text"][1:-1]))
        return f"{found['regex']}{json.dumps(rewrite_regex(inner), ensure_ascii=False)}"
    return found[0]


@lru_cache(maxsize=1024)
def _rewrite_class(text: str, json_string: bool = False) -> str:
    """Returns an equivalent class, unchanged if XGrammar supports it. In a JSON string, characters
    that JSON escapes become alternatives with their escapes."""
    if not text.endswith("]"):
        return text  # XGrammar rejects it
    negated = text.startswith("[^")
    ranges = _ranges(text[1 + negated : -1])
    allowed = _complement([(0, 0), _SURROGATES, *(ranges if negated else _complement(ranges))])
    if not allowed:
        raise RuntimeError(f"no character matches {text:.100}")
    escaped = [point for point in _ESCAPED if json_string and _has(allowed, point)]
    if not escaped and _is_supported(ranges, negated) and not text.startswith(r"[\^"):
        return _long_escapes(text)
    plain = _complement([*_complement(allowed), *((point, point) for point in escaped)])
    choices = [class_of(plain)] if plain else []
    choices += [] if negated and plain else [_in_json(point) for point in escaped]
    return choices[0] if len(choices) == 1 and plain else f"(?:{'|'.join(choices)})"


def _is_supported(ranges: Ranges, negated: bool) -> bool:
    """Returns whether XGrammar supports a class with these characters: ASCII only, or a class that
    is not negated and has all non-ASCII characters."""
    if all(high < _STARTS[0] for _, high in ranges):
        return True
    return not negated and any(low <= _STARTS[0] and high == _POINT_MAX for low, high in ranges)


def _has(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)


def _ranges(body: str) -> Ranges:
    """Returns the characters of a class's body, in order and without overlaps."""
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
    """Yields parts of a range in which each trailing UTF-8 byte is either fixed or takes all
    values."""
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
    """Returns the code point of a character or of its escape."""
    if len(item) == 1:
        return ord(item)
    if len(item) > 2:
        digits = item[2:].strip("{}")
        return ord(digits.upper()) - 0x40 if item[1] == "c" else int(digits, 16)
    return _LETTERS.get(item[1], ord(item[1]))
