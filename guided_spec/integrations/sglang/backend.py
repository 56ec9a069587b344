"""The two classes that SGLang asks of a grammar backend, put together once SGLang is imported.

They take SGLang's requests as grammar specs, and advance each with its text as SGLang does.
Masks have the format of SGLang's own xgrammar backend, so what allocates, moves and applies them
is SGLang's.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import cache
from typing import Any

from guided_spec.errors import GrammarCompileError, GrammarStateError, GuidedSpecError
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.unique_keys import NotedGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint

ANY_JSON = "$$ANY$$"  # how SGLang writes "any JSON value"


def spec_of(key_type: str, key_string: str, *, any_whitespace: bool) -> GrammarSpec:
    """The spec of one of SGLang's grammar keys.

    key_type: "json", "regex", "ebnf" or "structural_tag". any_whitespace: for "json" alone.

    Raises GrammarCompileError for a tag that is not valid JSON, and for another type.
    """
    match key_type:
        case "json" if key_string == ANY_JSON:
            return GrammarSpec.json_schema("true", any_whitespace=any_whitespace)
        case "json":
            return GrammarSpec.json_schema(key_string, any_whitespace=any_whitespace)
        case "regex":
            return GrammarSpec.regex(key_string)
        case "ebnf":
            return GrammarSpec.ebnf(key_string)
        case "structural_tag":
            return GrammarSpec.structural_tag(_tag(key_string))
    raise GrammarCompileError(f"no grammar of the kind {key_type!r} is known")


def _tag(text: str) -> Any:
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarCompileError(f"the structural_tag is not JSON: {error}") from error
    if isinstance(tag, dict) and tag.get("structures") is not None:
        return _from_structures(tag)
    return _without_null_schemas(tag)


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form, ``{"structures": [...], "triggers": [...]}``, in today's words."""
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": tag["triggers"],
            "tags": tags,
            "at_least_one": bool(tag.get("at_least_one")),
        },
    }


def _without_null_schemas(node: Any) -> Any:
    """Tool calls without parameters come with a schema of null, which means any value."""
    if isinstance(node, list):
        return [_without_null_schemas(part) for part in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _without_null_schemas(value) for key, value in node.items()}
    if kept.get("type") in ("json_schema", "qwen_xml_parameter") and "json_schema" in kept:
        kept["json_schema"] = {} if kept["json_schema"] is None else kept["json_schema"]
    return kept


def make_backend(kind: str, vocabulary: Vocabulary, *, any_whitespace: bool) -> Any:
    """A ``GuidedBackend`` that is a ``BaseGrammarBackend`` of SGLang's as well."""
    return _classes()[1](kind, vocabulary, any_whitespace=any_whitespace)


class GuidedGrammar:
    """One request's grammar, as SGLang's scheduler and verifiers use it.

    As SGLang expects: refusals raise, and a finished text takes any token. A rollback costs no more
    than the tokens taken back, however long the text is.

    matcher: this request's, at the start of its text. stats: SGLang's ``GrammarStats``.
    backend: which of guided_spec's took the grammar, "xgrammar" or "llguidance".
    """

    def __init__(
        self, compiled: CompiledGrammar, matcher: GrammarMatcher, backend: str, stats: Any
    ) -> None:
        super().__init__()
        self.backend = backend
        self.grammar_stats = stats
        self._compiled, self._matcher = compiled, matcher
        self._text: list[int] = []  # the tokens that the matcher has taken
        self._ignored = 0  # tokens after the end of the text, which no matcher has seen
        self._constraint: Constraint | None = None

    @classmethod
    def at_start(
        cls, compiled: CompiledGrammar, backend: str = "", stats: Any = None
    ) -> GuidedGrammar:
        """The grammar of a new text, before its first token."""
        return cls(compiled, compiled.new_matcher(), backend, stats)

    def accept_token(self, token: int) -> None:
        """Advance by one token; tokens after the end of the text are counted and change nothing.

        Raises ValueError for a token that the grammar refuses: SGLang ends the request by it.
        """
        if self.is_terminated():
            self._ignored += 1
        elif self._matcher.accept_token(token):
            self._text.append(token)
        else:
            raise ValueError(
                f"the grammar refuses token {token} at position {len(self._text)} of its text"
            )
        self.current_token = token

    def rollback(self, k: int) -> None:
        """Take back the last ``k`` tokens."""
        unseen = min(k, self._ignored)
        self._ignored -= unseen
        seen = k - unseen
        if seen:
            self._matcher.rollback(seen)
            del self._text[-seen:]
            if self._constraint is not None and len(self._constraint.committed) > len(self._text):
                self._constraint = None

    def is_terminated(self) -> bool:
        """Whether the text is complete."""
        return self._matcher.is_terminated()

    def constraint(self) -> Constraint | None:
        """A constraint at this position for a proposer; None where nothing can be drafted.

        It has matchers of its own, which are advanced to this one's position at each call. None
        for a complete text, and where these matchers refuse what this one has taken.
        """
        if self.is_terminated():
            return None
        if self._constraint is None:
            self._constraint = Constraint(self._compiled)
        try:
            self._constraint.commit(self._text[len(self._constraint.committed) :])
        except GrammarStateError:
            self._constraint = None
        return self._constraint

    def copy(self) -> GuidedGrammar:
        """An independent one at the same position; its grammar is not compiled again."""
        stats = self.grammar_stats
        if stats is not None:
            stats = replace(stats, is_cache_hit=True, tree_traversal_time=[])
        copied = type(self)(self._compiled, self._matcher.fork(), self.backend, stats)
        copied._text, copied._ignored = [*self._text], self._ignored
        return copied

    @staticmethod
    def allocate_vocab_mask(vocab_size: int, batch_size: int, device: Any) -> Any:
        """int32 [batch_size, W] on the host, all ones."""
        return _xgrammar().XGrammarGrammarBackend.allocate_vocab_mask(
            vocab_size, batch_size, device
        )

    def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
        """Write what may come next into row ``idx``; that of a complete text is left as it is."""
        if not self.is_terminated():
            self._matcher.fill_next_token_bitmask(vocab_mask, idx)

    @staticmethod
    def reset_vocab_mask(vocab_mask: Any) -> None:
        """Set all rows to ones."""
        vocab_mask.fill_(-1)

    @staticmethod
    def move_vocab_mask(vocab_mask: Any, device: Any) -> Any:
        """The mask on ``device``."""
        return _xgrammar().XGrammarGrammarBackend.move_vocab_mask(vocab_mask, device)

    @staticmethod
    def apply_vocab_mask(logits: Any, vocab_mask: Any) -> None:
        """Set the logits of forbidden tokens to -inf, in-place."""
        # A method there, but one without a use for its object.
        _xgrammar().XGrammarGrammar.apply_vocab_mask(None, logits, vocab_mask)


class GuidedBackend:
    """Compiles SGLang's grammars with guided_spec.

    kind: "auto", "xgrammar" or "llguidance".
    any_whitespace: whether the model chooses the whitespace between JSON values.

    What cannot be enforced in full is refused: the request fails before its first token, with the
    reason. Large grammars are tried out in a process of their own.
    """

    def __init__(self, kind: str, vocabulary: Vocabulary, *, any_whitespace: bool) -> None:
        super().__init__()
        self._any_whitespace = any_whitespace
        self._compiler = GrammarPipeline.of(kind, vocabulary)

    def dispatch_json(self, key_string: str) -> Any:
        """A JSON schema as text, or SGLang's word for any JSON value."""
        return self._compile("json", key_string)

    def dispatch_regex(self, key_string: str) -> Any:
        """A regular expression for the whole text."""
        return self._compile("regex", key_string)

    def dispatch_ebnf(self, key_string: str) -> Any:
        """A grammar in xgrammar's GBNF dialect."""
        return self._compile("ebnf", key_string)

    def dispatch_structural_tag(self, key_string: str) -> Any:
        """A structural tag in either of SGLang's forms."""
        return self._compile("structural_tag", key_string)

    @property
    def is_support_token_filter(self) -> bool:
        """Whether ``set_token_filter`` works, which strict thinking needs."""
        return True

    def set_token_filter(self, *args: Any, **kwargs: Any) -> None:
        """Set SGLang's token filter as its xgrammar backend does: masks have the same format."""
        _xgrammar().XGrammarGrammarBackend.set_token_filter(*args, **kwargs)

    # Reasoning without a grammar asks the backend.
    allocate_vocab_mask = staticmethod(GuidedGrammar.allocate_vocab_mask)
    move_vocab_mask = staticmethod(GuidedGrammar.move_vocab_mask)
    apply_vocab_mask = staticmethod(GuidedGrammar.apply_vocab_mask)

    def _compile(self, key_type: str, key_string: str) -> Any:
        base = _base()
        try:
            spec = spec_of(key_type, key_string, any_whitespace=self._any_whitespace)
            compiled = self._compiler.compile(spec)
        except GuidedSpecError as error:
            return base.InvalidGrammarObject(str(error))
        stats = base.GrammarStats(dispatch_type=key_type)
        name = compiled.backend if isinstance(compiled, NotedGrammar) else ""
        return _classes()[0].at_start(compiled, name, stats)


@cache
def _classes() -> tuple[type[GuidedGrammar], type[GuidedBackend]]:
    # SGLang asks for its own base classes, which cannot be named where it is not installed.
    base = _base()
    return (
        type("SGLangGrammar", (GuidedGrammar, base.BaseGrammarObject), {}),
        type("SGLangBackend", (GuidedBackend, base.BaseGrammarBackend), {}),
    )


def _base() -> Any:
    return importlib.import_module("sglang.srt.constrained.base_grammar_backend")


def _xgrammar() -> Any:
    return importlib.import_module("sglang.srt.constrained.xgrammar_backend")
