"""Grammars that compile at once and take more and more time to match."""

from __future__ import annotations

import random

from prism.messages.requests import Grammar

# Ten rules that begin with one another: seconds of CPU time at the 28th "a".
TEN_RULES = 'root ::= s0 "b"\n' + "\n".join(
    f's{i} ::= s{(i + 1) % 10} s{(i + 3) % 10} | s{(i + 7) % 10} s{i} | "a"' for i in range(10)
)


def nested_stars(depth: int, inner: str = "[a-z]") -> str:
    return "(" * depth + inner + "*" + ")*" * depth


SLOW = {
    "ten-rules": Grammar("ebnf", TEN_RULES),
    "stars": Grammar("ebnf", f'root ::= {nested_stars(60)} "b"'),
    "regex": Grammar("regex", nested_stars(40) + "b"),
}


def random_slow(seed: int) -> Grammar:
    """Returns an ambiguous grammar over the letter "a" that ends with "b", by a seed."""
    draw = random.Random(seed)
    if draw.random() < 0.2:
        inner = draw.choice(["[a-z]", "a", "(a|aa)", "a?"])
        return Grammar("ebnf", f'root ::= {nested_stars(draw.randint(5, 80), inner)} "b"')
    rules = draw.randint(1, 12)

    def sequence() -> str:
        parts = [f"s{draw.randrange(rules)}" for _ in range(draw.randint(1, 6))]
        return " ".join(part + draw.choice(["", "", "", "?", "*"]) for part in parts)

    made = ['root ::= s0 "b"']
    for rule in range(rules):
        choices = [sequence() for _ in range(draw.randint(1, 4))]
        made.append(f's{rule} ::= {" | ".join(choices)} | "a"')
    return Grammar("ebnf", "\n".join(made))
