"""The grammar options that commands share."""

from __future__ import annotations

from pathlib import Path

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["grammar_from_options", "read_text", "starting_after"]


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
    """The file's text; ``-`` is not special. Raises ConfigError naming the option."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"cannot be read: {error}") from error
