"""A spec on its way to a backend: read, measured, lowered and prepared once, whoever asks."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.schema_lowering import Lowered
from guided_spec.grammar.schema_prepare import examine_schema, lower_checked
from guided_spec.grammar.schema_report import PreparedSchema
from guided_spec.grammar.size import (
    ENDLESS,
    LARGE_SOURCE,
    Extent,
    GrammarSize,
    measure_json,
    measure_text,
)
from guided_spec.grammar.spec import GrammarSpec

__all__ = ["SpecDocument", "is_large"]

_TEXTS = ("regex", "ebnf", "lark")
_ANY_OBJECT = {"type": "object"}


class SpecDocument:
    """A spec and the stages of its way. What a stage holds is not to be changed.

    Each is made when it is first asked for. Used by one thread.
    """

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec

    @property
    def value(self) -> Any:
        """The JSON value that the source is. Raises GrammarCompileError where it is none."""
        value = self._parsed
        if isinstance(value, Exception):
            error = GrammarCompileError(f"the {self.spec.kind} is not JSON: {value}")
            raise error from value
        return value

    @cached_property
    def size(self) -> GrammarSize:
        """What of the source drives the cost of compiling it. Broken ones are measured too."""
        if self.spec.kind in _TEXTS:
            return measure_text(self.spec.source, is_regex=self.spec.kind == "regex")
        if isinstance(self._parsed, RecursionError):
            return GrammarSize(Extent(ENDLESS), Extent(), Extent(), 0, large=True)
        return measure_json(self._parsed, len(self.spec.source))

    @cached_property
    def lowered(self) -> Lowered:
        """The JSON schema, checked, in the keywords that all backends share.

        Raises GrammarCompileError where it is broken.
        """
        if self.spec.kind == "json_object":
            return Lowered(_ANY_OBJECT, ())
        return lower_checked(self.value, self.spec.additional_properties)

    @cached_property
    def examined(self) -> PreparedSchema:
        """The lowered schema rewritten for xgrammar, and what that could not keep."""
        return examine_schema(self.lowered)

    @cached_property
    def _parsed(self) -> Any:
        """The value, or the error in its place."""
        try:
            return json.loads(self.spec.source)
        except (ValueError, RecursionError) as error:
            return error


def is_large(spec: GrammarSpec) -> bool:
    """Whether compiling ``spec`` may take seconds or more; microseconds for an ordinary one."""
    return len(spec.source) > LARGE_SOURCE or SpecDocument(spec).size.large
