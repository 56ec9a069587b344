"""What commands read: the grammar options that they share, and standard input."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec

__all__ = [
    "grammar_from_options",
    "read_prompt",
    "read_text",
    "require_one_stdin",
    "starting_after",
]

STDIN = "-"


def grammar_from_options(
    schema: Path | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> GrammarSpec | None:
    """The one grammar that was asked for, None for free text.

    grammar: a file, EBNF unless its name ends in ``.lark``. Raises ConfigError when two are given
    or a file cannot be read.
    """
    given = [
        name
        for name, value in zip(
            ("--schema", "--regex", "--choice", "--grammar"),
            (schema, regex, choice, grammar),
            strict=True,
        )
        if value
    ]
    if len(given) > 1:
        raise ConfigError(given[1], "given", f"cannot go with {given[0]}: choose one grammar")
    if schema is not None:
        return GrammarSpec.json_schema(read_text("--schema", schema))
    if regex is not None:
        return GrammarSpec.regex(regex)
    if choice:
        return GrammarSpec.choice(choice)
    if grammar is not None:
        text = read_text("--grammar", grammar)
        return GrammarSpec.lark(text) if grammar.suffix == ".lark" else GrammarSpec.ebnf(text)
    return None


def starting_after(grammar: GrammarSpec | None, marker: str | None) -> GrammarSpec | None:
    """The grammar behind ``marker``, at once if that is None. Raises ConfigError without one."""
    if marker is None:
        return grammar
    if grammar is None:
        raise ConfigError("--after", marker, "needs a grammar; give one")
    return grammar.after(marker)


def read_text(option: str, path: Path) -> str:
    """The file's text; ``-`` is standard input. Raises ConfigError naming the option."""
    try:
        if str(path) == STDIN:
            return sys.stdin.buffer.read().decode("utf-8")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"cannot be read: {error}") from error


def read_prompt(prompt: str) -> str:
    """The prompt itself; of ``-``, standard input without the end of its last line."""
    if prompt != STDIN:
        return prompt
    return read_text("PROMPT", Path(prompt)).removesuffix("\n").removesuffix("\r")


def require_one_stdin(given: Mapping[str, object]) -> None:
    """Raises ConfigError when two of these, by their names, are standard input."""
    asking = [name for name, value in given.items() if str(value) == STDIN]
    if len(asking) > 1:
        fix = f"is standard input, which {asking[0]} reads already; name a file"
        raise ConfigError(asking[1], STDIN, fix)
