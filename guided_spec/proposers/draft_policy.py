"""Which draft policy a request gets, and what that means for how a draft can be made."""

from __future__ import annotations

from guided_spec.core import DecodeBatch
from guided_spec.errors import ConfigError
from guided_spec.types import DRAFT_POLICIES, DraftPolicy

__all__ = ["drafts_best", "drafts_masked", "read_policy", "used_policies"]


def read_policy(argument: str, default: DraftPolicy) -> DraftPolicy:
    """The policy behind the colon of a proposer's name; ``default`` where nothing stands there.

    Raises ConfigError for another word.
    """
    for policy in (default, *DRAFT_POLICIES):
        if argument in ("", policy):
            return policy  # type: ignore[return-value]
    raise ConfigError("draft policy", argument, f"must be one of {', '.join(DRAFT_POLICIES)}")


def used_policies(batch: DecodeBatch, policy: DraftPolicy) -> list[DraftPolicy]:
    """[B]: what each request drafts under; policy: of those that do not ask for one."""
    return [own or policy for own in batch.policies or (None,) * len(batch)]


def drafts_best(batch: DecodeBatch, policy: DraftPolicy) -> bool:
    """Whether every draft token of the batch is its drafter's best one, whatever the grammars say.

    policy: of the requests that do not ask for one. Such a draft can be made in one go, and handed
    to ``DraftLoop.take``.
    """
    if batch.adjustments is not None:
        return False
    masked = [used == "mask" for used in used_policies(batch, policy)]
    waits = zip(masked, batch.constraints, strict=True)
    return batch.sampling.all_greedy and not any(
        is_masked and constraint is not None for is_masked, constraint in waits
    )


def drafts_masked(batch: DecodeBatch, policy: DraftPolicy) -> bool:
    """Whether every request of the batch drafts under masks, and nothing but them changes logits.

    policy: of the requests that do not ask for one. Such a draft can be made by a ``MaskedWalk``,
    and handed to ``DraftLoop.take_masked``.
    """
    is_constrained = any(constraint is not None for constraint in batch.constraints)
    is_masked = all(used == "mask" for used in used_policies(batch, policy))
    return batch.adjustments is None and is_constrained and is_masked
