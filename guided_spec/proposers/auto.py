"""``auto``: the proposer that fits the draft checkpoint, or the target's own."""

from __future__ import annotations

import re
from pathlib import Path

from guided_spec.core import Proposer
from guided_spec.models.head_loading import find_method
from guided_spec.proposers import build_proposer
from guided_spec.proposers.context import ProposerContext

__all__ = ["auto", "resolve_auto"]

AUTO = re.compile(r"(?<![^:+])auto(?![^:+])")  # a whole name, in a chain or alone


def auto(context: ProposerContext) -> Proposer:
    """What fits the draft checkpoint, or the target's own, see ``resolve_auto``."""
    return build_proposer(resolve_auto(f"auto:{context.argument}", context), context)


def resolve_auto(spec: str, context: ProposerContext) -> str:
    """``spec`` with every ``auto`` replaced.

    With a draft: the head's method, found from its checkpoint, or ``draft_model``. Without one: the
    MTP layers in the target's checkpoint if there are any, else ``ngram``.

    Raises ModelError when a checkpoint cannot be read or is of an unknown kind.
    """
    if not AUTO.search(spec):
        return spec
    found = _find(context)
    return AUTO.sub(found, spec).removesuffix(":")


def _find(context: ProposerContext) -> str:
    if context.draft is None:
        method = None if context.target is None else find_method(None, context.target)
        return method or "ngram"
    if not isinstance(context.draft, str | Path) or context.target is None:
        return "draft_model"
    return find_method(context.draft, context.target) or "draft_model"
