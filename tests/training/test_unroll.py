"""What a head computes in training is what it computes when it drafts, at every place and depth."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.heads.loading import load_head
from guided_spec.models.heads.slot_head import SlotHead, SlotLimits
from guided_spec.training.algorithms.heads import unroll, unroll_mask
from tests.learned_heads import TARGETS, write_head

VOCAB = 64
LENGTH = 9
STEPS = 4

# A block is not unrolled.
METHODS = [
    *(
        name
        for name in TARGETS
        if name not in ("dflash", "dflash2", "domino", "dspark", "lilicorr", "p_eagle")
    ),
    "deepseek_mtp of 2",
    "deepseek_mtp of 3",
]


class Headed(NamedTuple):
    """A random head, its target, and one document's tokens [1, T] and states [1, T, X]."""

    head: DraftHead
    target: PreTrainedModel
    token_ids: Tensor
    states: Tensor


@pytest.fixture(scope="module", params=METHODS)
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    method, _, modules = request.param.partition(" of ")
    changes = {"num_modules": int(modules)} if modules else {}
    target, draft = write_head(tmp_path_factory.mktemp("head") / "x", method, VOCAB, **changes)
    head = load_head(method, draft, target)
    random = torch.Generator().manual_seed(3)
    config: Any = target.config.get_text_config(decoder=True)
    width = len(head.aux_hidden_layers) * config.hidden_size
    states = torch.randn(1, LENGTH, width, generator=random)
    return Headed(head, target, torch.randint(VOCAB, (1, LENGTH), generator=random), states)


def drafted(headed: Headed, place: int) -> list[Tensor]:
    """Logits [D] of each depth, as the serving side makes them behind tokens 0 to place + 1."""
    head, tokens = headed.head, headed.token_ids[0]
    slots = SlotHead(head, SlotLimits(1, 32), device=torch.device("cpu"), dtype=torch.float32)
    verified = tokens[1 : place + 2].tolist()
    slots.read([0], [verified], [headed.states[0, : place + 1]])
    found = [slots.logits([0])[0].clone()]
    for depth in range(1, min(STEPS, LENGTH - 1 - place)):
        slots.append([0], tokens[place + 1 + depth].view(1))
        found.append(slots.logits([0])[0].clone())
    return found


def test_training_is_drafting(headed: Headed) -> None:
    with torch.no_grad():
        hidden = list(unroll(headed.head, headed.token_ids, headed.states, STEPS))
        trained = [headed.head.logits(state[0]) for state in hidden]
    for place in range(LENGTH - 1):
        for depth, logits in enumerate(drafted(headed, place)):
            torch.testing.assert_close(trained[depth][place], logits, rtol=1e-4, atol=1e-5)


def test_padding_and_neighbours_change_nothing(headed: Headed) -> None:
    with torch.no_grad():
        alone = list(unroll(headed.head, headed.token_ids, headed.states, STEPS))
        tokens = torch.randint(VOCAB, (2, LENGTH + 5))
        tokens[1, :LENGTH] = headed.token_ids[0]
        states = torch.randn(2, LENGTH + 5, headed.states.shape[-1])
        states[1, :LENGTH] = headed.states[0]
        padded = list(unroll(headed.head, tokens, states, STEPS))
    for depth, state in enumerate(alone):
        valid = LENGTH - 1 - depth  # places whose next tokens are all in the document
        torch.testing.assert_close(padded[depth][1, :valid], state[0, :valid], rtol=1e-4, atol=1e-5)


def gradients_of(headed: Headed, *, recompute: bool) -> list[Tensor]:
    """Of the states and the head's parameters; the depths are weighted apart."""
    module: Any = headed.head
    states = headed.states.clone().requires_grad_()
    depths = unroll(headed.head, headed.token_ids, states, STEPS, recompute=recompute)
    loss = torch.stack([(1 + at) * hidden.sin().sum() for at, hidden in enumerate(depths)]).sum()
    trained = [parameter for parameter in module.layers.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, [states, *trained], allow_unused=True)
    return [loss, *(part for part in found if part is not None)]


def test_a_second_run_in_the_backward_pass_gives_the_same(headed: Headed) -> None:
    module: Any = headed.head
    module.requires_grad_(requires_grad=True)
    kept, again = (gradients_of(headed, recompute=recompute) for recompute in (False, True))
    module.requires_grad_(requires_grad=False)
    assert len(kept) > 2
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other)


@given(st.integers(1, 7), st.integers(0, 4), st.none() | st.integers(1, 6))
def test_mask_by_its_definition(length: int, repeats: int, window: int | None) -> None:
    mask = unroll_mask(length, repeats, window=window)
    assert mask.shape == (length, (1 + repeats) * length)
    for query in range(length):
        for column in range(mask.shape[1]):
            depth, place = divmod(column, length)
            seen = place <= query if depth == 0 else place == query
            position = place + depth  # where this key stood when it was drafted
            if window is not None:
                seen = seen and position > query + repeats - window
            assert bool(mask[query, column]) == seen
