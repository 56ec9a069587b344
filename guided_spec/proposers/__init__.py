"""The proposers by name, and how a new one joins them.

A name is found in ``PROPOSERS`` (built in, or added by ``register_proposer``) or among the entry
points of the group ``guided_spec.proposers``. The text after a colon is the proposer's own
argument: ``chain:grammar_forced+ngram``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, TypeAlias

from guided_spec.errors import ConfigError, UnknownProposerError
from guided_spec.kinds import did_you_mean

if TYPE_CHECKING:  # names are listed where torch is not loaded
    from guided_spec.core import Proposer, ProposerContext, SimpleProposer

Factory: TypeAlias = "Callable[[ProposerContext], Proposer | SimpleProposer]"
ENTRY_POINT_GROUP = "guided_spec.proposers"
AUTO = re.compile(r"(?<![^:+])auto(?![^:+])")  # a whole name, in a chain or alone
_AUTO_AND_ARGUMENT = re.compile(r"(?<![^:+])auto:[^+]*")

PROPOSERS: dict[str, str | Factory] = {
    "auto": "guided_spec.proposers:auto",
    "chain": "guided_spec.proposers.chain:Chain",
    "deepseek_mtp": "guided_spec.proposers.learned_head:deepseek_mtp",
    "dflash": "guided_spec.proposers.learned_head:dflash",
    "dflash2": "guided_spec.proposers.learned_head:dflash2",
    "domino": "guided_spec.proposers.learned_head:domino",
    "draft_model": "guided_spec.proposers.draft_model:DraftModel",
    "dspark": "guided_spec.proposers.learned_head:dspark",
    "eagle": "guided_spec.proposers.learned_head:eagle",
    "eagle3": "guided_spec.proposers.learned_head:eagle3",
    "glm4_moe_mtp": "guided_spec.proposers.learned_head:glm4_moe_mtp",
    "grammar_forced": "guided_spec.proposers.grammar_forced:GrammarForced",
    "lilicorr": "guided_spec.proposers.learned_head:lilicorr",
    "mtp": "guided_spec.proposers.learned_head:mtp",
    "ngram": "guided_spec.proposers.ngram:NGram",
    "none": "guided_spec.proposers.drafting:NoDraft",
    "p_eagle": "guided_spec.proposers.learned_head:p_eagle",
    "pard": "guided_spec.proposers.draft_model:Pard",
    "qwen3_5_mtp": "guided_spec.proposers.learned_head:qwen3_5_mtp",
    "suffix": "guided_spec.proposers.suffix:Suffix",
}


_PLAIN = ("ngram", "none", "suffix")  # take no argument after a colon
_WITHOUT_DRAFT = (*_PLAIN, "grammar_forced")
# All others may find what they draft with in the target's own checkpoint.
_WITH_DRAFT = (
    *("dflash", "dflash2", "domino", "dspark", "lilicorr"),
    *("draft_model", "eagle", "eagle3", "p_eagle", "pard"),
)


def register_proposer(name: str, factory: str | Factory) -> None:
    """Add a proposer: a callable that takes a ``ProposerContext``, or ``"module:Callable"``.

    Raises ConfigError when the name is taken or holds one of ``:+``.
    """
    if not name or set(name) & set(":+"):
        raise ConfigError("name", name, "must be a non-empty name without ':' and '+'")
    if name in PROPOSERS:
        raise ConfigError("name", name, "is taken; choose another, or delete PROPOSERS[name] first")
    PROPOSERS[name] = factory


def proposer_names() -> list[str]:
    """Every name that ``build_proposer`` knows, sorted."""
    return sorted({*PROPOSERS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def require_proposer(spec: str) -> None:
    """Raise UnknownProposerError for a spec with a name that is not registered, and ConfigError for
    what is no str or has an argument for a name that takes none. Builds nothing."""
    if not isinstance(spec, str):
        raise ConfigError("proposer", spec, "must be a name, such as 'ngram'")
    members = spec.removeprefix("chain:")
    for member in [spec] if members == spec else members.split("+"):
        name, _, argument = member.partition(":")
        if name not in proposer_names():
            raise _unknown(name)
        _require_argument_allowed(name, argument)


def require_draft(spec: str, draft: object) -> None:
    """Raise ConfigError for a draft that nothing in ``spec`` takes, and for one that is missing."""
    if draft is not None and not takes_draft(spec):
        fix = f"{spec} drafts without a model: leave it out, or name a proposer that takes one"
        raise ConfigError("draft", draft, fix)
    missing = [name for name in _names(spec) if name in _WITH_DRAFT]
    if draft is None and missing:
        fix = f"{missing[0]} drafts with a model: name its folder or hub id, or choose another"
        raise ConfigError("draft", None, f"{fix} proposer, such as ngram")


def takes_draft(spec: str) -> bool:
    """Whether ``spec`` may be given a draft.

    Plain decoding, "none", takes any and uses none: it is what others with that draft are compared
    to, with the same memory for texts.
    """
    return spec == "none" or not all(name in _WITHOUT_DRAFT for name in _names(spec))


def _names(spec: str) -> list[str]:
    return [member.partition(":")[0] for member in spec.removeprefix("chain:").split("+")]


def _require_argument_allowed(name: str, argument: str) -> None:
    if argument and name in _PLAIN:
        fix = f"{name} takes nothing after the colon: pass {name!r}"
        raise ConfigError("proposer", f"{name}:{argument}", fix)


def _unknown(name: str) -> UnknownProposerError:
    names = proposer_names()
    fix = f"must be one of {', '.join(names)}{did_you_mean(name, names)}"
    return UnknownProposerError("proposer", name, fix)


def build_proposer(spec: str, context: ProposerContext) -> Proposer:
    """Make the proposer that ``spec`` names: ``"ngram"``, ``"chain:grammar_forced+ngram"``, ...

    Raises UnknownProposerError, ConfigError for an argument that the proposer does not take, and
    whatever its own constructor raises.
    """
    name, _, argument = spec.partition(":")
    _require_argument_allowed(name, argument)
    from guided_spec.core import from_propose  # loads torch

    return from_propose(_find(name)(replace(context, argument=argument)))


def _find(name: str) -> Factory:
    factory = PROPOSERS.get(name)
    if factory is None:
        for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
            loaded: Factory = point.load()
            return loaded
        raise _unknown(name)
    if isinstance(factory, str):
        named: Factory = resolve_name(factory)
        return named
    return factory


def auto(context: ProposerContext) -> Proposer:
    """What fits the draft checkpoint, or the target's own, see ``resolve_auto``."""
    return build_proposer(resolve_auto(f"auto:{context.argument}", context), context)


def resolve_auto(spec: str, context: ProposerContext) -> str:
    """``spec`` with every ``auto`` replaced.

    With a draft: the head's method, found from its checkpoint, ``pard`` or ``draft_model``. Without
    one: the MTP layers in the target's checkpoint if there are any, else ``ngram``.

    Raises ModelError when a checkpoint cannot be read or is of an unknown kind.
    """
    if not AUTO.search(spec):
        return spec
    name = _fitting(context)
    if name in _PLAIN:  # what was asked of a model's drafts is nothing to one without a model
        spec = _AUTO_AND_ARGUMENT.sub("auto", spec)
    return AUTO.sub(name, spec).removesuffix(":")


def _fitting(context: ProposerContext) -> str:
    from guided_spec.models.heads.loading import find_method  # loads torch

    if context.draft is None:
        method = None if context.target is None else find_method(None, context.target)
        return method or "ngram"
    if isinstance(context.draft, str | Path):
        method = None if context.target is None else find_method(context.draft, context.target)
        return method or "draft_model"
    return "draft_model" if context.draft.config.to_dict().get("pard_token") is None else "pard"
