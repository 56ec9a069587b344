"""Free text as rules over characters, where the backend's own kind of it would be over bytes.

xgrammar looks for strings in free text byte by byte, so that such text may hold any bytes, also
those that stand for added tokens. Text of these rules holds characters alone.
"""

from __future__ import annotations

from collections.abc import Sequence


def text_without(excluded: Sequence[str]) -> str:
    """Any text that contains none of some non-empty strings, as EBNF with the rule ``root``.

    A state is what the text ends with, of all beginnings of the strings: the automaton of Aho and
    Corasick, "Efficient string matching", CACM 18(6), 1975. The text may end in each of them.
    """
    if not excluded:
        return "root ::= [\\x00-\\U0010ffff]*\n"
    prefixes = sorted({text[:end] for text in excluded for end in range(len(text))} | {""})
    letters = sorted({letter for text in excluded for letter in text})
    number = {prefix: at for at, prefix in enumerate(prefixes)}  # "" is the first
    others = f"[^{''.join(map(_code, letters))}]"
    rules = ["root ::= text_0"]
    for prefix, at in number.items():
        options = ['""', f"{others} text_0"]
        for letter in letters:
            text = prefix + letter
            if not any(text.endswith(one) for one in excluded):
                end = next(text[i:] for i in range(len(text) + 1) if text[i:] in number)
                options.append(f'"{_code(letter)}" text_{number[end]}')
        rules.append(f"text_{at} ::= {' | '.join(options)}")
    return "\n".join([*rules, ""])


def _code(letter: str) -> str:
    return f"\\U{ord(letter):08x}"
