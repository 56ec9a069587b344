"""The default backend: grammars compiled by xgrammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

import jsonschema
import numpy as np
import xgrammar

from guided_spec.errors import (
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.regex import to_fullmatch
from guided_spec.grammar.schema import normalize
from guided_spec.grammar.schema_report import Unenforced
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["XGrammarBackend", "XGrammarGrammar"]

_CACHE_BYTES = 256 * 2**20
_CACHE_BUG = "per_rule_fsm_hashes"
_SOURCE_PREFIX = re.compile(r"^(?:\[[\d:]+\] )?(?:\S+\.(?:cc|h|cpp):\d+: )?")
_SHOWN = 5
_ANY_OBJECT = {"type": "object", "additionalProperties": {}}


class XGrammarBackend:
    """Compiles grammars with xgrammar for one vocabulary; safe to use from several threads.

    compile_threads: native threads that one compile may use.

    Every finished text satisfies its grammar. JSON schemas are first rewritten into what xgrammar
    enforces (see ``schema.py`` for what that narrows), regexes into what it reads correctly; both
    also inside structural tags. EBNF and Lark are xgrammar's own dialects and pass as they are.
    """

    def __init__(self, vocabulary: Vocabulary, *, compile_threads: int = 2) -> None:
        self.vocabulary = vocabulary
        self._without_bytes = frozenset(
            token for token, data in enumerate(vocabulary.token_bytes) if not data
        ) - {*vocabulary.stop_token_ids}
        info = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=list(vocabulary.stop_token_ids),
        )
        self._cached = xgrammar.GrammarCompiler(
            info, max_threads=compile_threads, cache_limit_bytes=_CACHE_BYTES
        )
        self._uncached = xgrammar.GrammarCompiler(
            info, max_threads=compile_threads, cache_enabled=False
        )

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        """Compile ``spec``; may take seconds and cannot be interrupted.

        Raises GrammarCompileError (broken), UnsupportedSchemaError (valid, but not enforceable in
        full) or UnsatisfiableGrammarError (nothing matches).
        """
        source = _prepare(spec)
        compiled = self._compile(spec, source, any_whitespace=spec.any_whitespace)
        self._require_a_first_token(spec, compiled)
        style = self._compile(spec, source, any_whitespace=False) if spec.any_whitespace else None
        # A structural tag may name special tokens; all other grammars are made of bytes.
        excluded = frozenset() if spec.kind == "structural_tag" else self._without_bytes
        return XGrammarGrammar(compiled, style, excluded)

    def _compile(self, spec: GrammarSpec, source: str, *, any_whitespace: bool) -> Any:
        try:
            try:
                return _run(self._cached, spec, source, any_whitespace=any_whitespace)
            except RuntimeError as error:
                if _CACHE_BUG not in str(error):
                    raise
                # Repeats beyond 128 fail in xgrammar 0.2.8 when its rule cache is on.
                return _run(self._uncached, spec, source, any_whitespace=any_whitespace)
        except (RuntimeError, ValueError, RecursionError) as error:
            reason = _SOURCE_PREFIX.sub("", str(error)).strip() or "the backend gave no reason"
            raise GrammarCompileError(f"the {spec.kind} does not compile: {reason}") from error

    def _require_a_first_token(self, spec: GrammarSpec, compiled: Any) -> None:
        bitmask = np.zeros((1, -(-self.vocabulary.vocab_size // 32)), dtype=np.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bitmask)
        if not bitmask.any():
            raise UnsatisfiableGrammarError(f"no text of this vocabulary matches the {spec.kind}")


@dataclass(frozen=True, slots=True, eq=False)
class XGrammarGrammar:
    """A grammar compiled by xgrammar; immutable, shared by requests."""

    compiled: Any
    style: Any | None = None
    excluded: frozenset[int] = frozenset()

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        return cast(GrammarMatcher, xgrammar.GrammarMatcher(self.compiled))

    def new_style_matcher(self) -> GrammarMatcher | None:
        """A matcher that fixes the whitespace to ``", "`` and ``": "``; None if it is fixed."""
        if self.style is None:
            return None
        return cast(GrammarMatcher, xgrammar.GrammarMatcher(self.style))


def _run(compiler: Any, spec: GrammarSpec, source: str, *, any_whitespace: bool) -> Any:
    match spec.kind:
        case "json_schema" | "json_object":
            return compiler.compile_json_schema(
                source, any_whitespace=any_whitespace, strict_mode=False
            )
        case "regex" | "choice":
            return compiler.compile_regex(source)
        case "ebnf":
            # A rule above the root: the mask is too strict for a root that refers to itself.
            above = f"{spec.root}_above"
            text = f"{source}\n{above} ::= {spec.root}\n"
            return compiler.compile_grammar(text, root_rule_name=above)
        case "lark":
            return compiler.compile_lark(source)
        case "structural_tag":
            return compiler.compile_structural_tag(source)


def _prepare(spec: GrammarSpec) -> str:
    """The source to hand to xgrammar."""
    match spec.kind:
        case "json_schema":
            return json.dumps(_prepare_schema(_parse(spec)))
        case "json_object":
            return json.dumps(_ANY_OBJECT)
        case "regex":
            return to_fullmatch(spec.source)
        case "choice":
            return "|".join(to_fullmatch(re.escape(option)) for option in _parse(spec))
        case "structural_tag":
            return json.dumps(_prepare_tag(_parse(spec)))
    return spec.source


def _parse(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.source)
    except (ValueError, RecursionError) as error:
        raise GrammarCompileError(f"the {spec.kind} is not JSON: {error}") from error


def _prepare_schema(schema: Any) -> Any:
    """The schema as xgrammar enforces it; raises if some of it would go unenforced."""
    if not isinstance(schema, dict | bool):
        raise GrammarCompileError("not a JSON schema: it must be an object, true or false")
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(cast(dict[str, Any], schema))
        prepared = normalize(schema)
    except jsonschema.SchemaError as error:
        pointer = "/".join(["", *map(str, error.absolute_path)])
        raise GrammarCompileError(f"not a JSON schema: at {pointer!r}: {error.message}") from error
    except (re.error, RecursionError, OverflowError) as error:
        raise GrammarCompileError(f"not a JSON schema: {error}") from error
    errors = [entry for entry in prepared.unenforced if entry.level == "error"]
    if errors:
        raise UnsupportedSchemaError(_describe(errors))
    if prepared.schema is False:
        raise UnsatisfiableGrammarError("no value is valid under the JSON schema")
    return prepared.schema


def _describe(errors: list[Unenforced]) -> str:
    lines = [f"{e.pointer or '/'}: {e.keyword}: {e.reason}; {e.fix}" for e in errors[:_SHOWN]]
    if len(errors) > _SHOWN:
        lines.append(f"and {len(errors) - _SHOWN} more (see schema.find_unenforced)")
    return "the JSON schema cannot be enforced in full:\n  " + "\n  ".join(lines)


def _prepare_tag(tag: Any) -> Any:
    """A structural tag with its schemas and regexes prepared as those of their own kinds are."""
    if isinstance(tag, list):
        return [_prepare_tag(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    prepared = {}
    for key, value in tag.items():
        if key in ("json_schema", "schema") and isinstance(value, dict | bool):
            prepared[key] = _prepare_schema(value)
        elif key == "pattern" and tag.get("type") == "regex" and isinstance(value, str):
            prepared[key] = to_fullmatch(value)
        else:
            prepared[key] = _prepare_tag(value)
    return prepared
