"""The feature ``forced``: text without a choice stands in vLLM's drafts, spelled in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm.drafts import heads as vllm_heads  # noqa: E402
from tests.integrations.vllm.drafters import (  # noqa: E402
    V1,
    V2,
    VOCABULARY,
    Table,
    config_of,
    encode,
    started,
    use_loops,
)
from tests.integrations.vllm.parts import (  # noqa: E402
    NUM_DRAFT,
    interpreted,
    sampling_params,
    tokenizer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and the Triton interpreter's
    pytest.mark.usefixtures("loops"),
    interpreted,
]
Make = Callable[..., Any]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUIDED_SPEC_VLLM", "forced")
    use_loops(monkeypatch)


@pytest.fixture(params=["v1", "v2", "v2 with graphs"])
def make(request: pytest.FixtureRequest) -> Make:
    """A drafter of one of the loops, from a config and a table."""
    if request.param == "v1":
        return V1
    graphs = "step" if "graphs" in request.param else "none"
    return lambda config, table, **options: V2(config, table, graphs=graphs, **options)


def spelled(text: str) -> list[int]:
    """``text`` in letters, which is how no tokenizer would have it."""
    return [token for letter in text for token in encode(letter)]


WORDS = ' "temperature": '
LONG = "x" + WORDS * 2


def letters_table(seed: int = 3) -> Table:
    """It writes ``WORDS`` letter by letter."""
    table = Table(seed)
    table.prefer(spelled("x" + WORDS), 40.0)
    return table


def next_of(table: Table, token: int, letters: str) -> int:
    """What the table writes behind a token: one of these letters, or some in a token."""
    texts = tokenizer().batch_decode([[one] for one in range(VOCABULARY)])
    ids = torch.tensor([one for one, text in enumerate(texts) if text and set(text) <= {*letters}])
    return int(ids[table.logits(token)[ids].argmax()])


def test_forced_text_is_spelled_as_the_tokenizer_spells_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    params = sampling_params(config, regex=LONG)
    forced = encode(WORDS * 2)[:NUM_DRAFT]
    assert forced != spelled(WORDS)[:NUM_DRAFT]
    drafter = started(make(config, letters_table()), request=params)
    assert drafter.step({"request": encode("x")})["request"] == forced
    alone = spelled(WORDS)[:NUM_DRAFT]
    monkeypatch.setattr(vllm_heads, "MOST_SEARCHED", 1)  # many requests are left to the drafter
    others = {"other": params, "free": sampling_params(config)}
    many = started(make(config, letters_table()), request=params, **others)
    assert many.step({"request": encode("x"), "free": [11]})["request"] == forced
    many.remove("request")
    many.add("request", params)
    many.wait("request")
    assert many.step({"request": encode("x"), "other": encode("x")})["request"] == alone
    monkeypatch.setenv("GUIDED_SPEC_VLLM", "drafts")
    plain = started(make(config, letters_table()), request=params)
    assert plain.step({"request": encode("x")})["request"] == alone


def test_the_drafter_goes_on_behind_forced_text_and_text_behind_its_own(make: Make) -> None:
    config, table = config_of(), letters_table()
    drafter = started(
        make(config, table),
        front=sampling_params(config, regex='x"sky[abc]{9}'),
        middle=sampling_params(config, regex='x[ab]"sky"[ab]'),
    )
    found = drafter.step({"front": encode("x"), "middle": encode("x")})
    front = encode('"sky')
    while len(front) < NUM_DRAFT:
        front.append(next_of(table, front[-1], "abc"))
    assert found["front"] == front[:NUM_DRAFT]
    first = next_of(table, encode("x")[0], "ab")
    assert found["middle"] == [first, *encode('"sky"')][:NUM_DRAFT]


def test_free_rows_stay_as_they_are(make: Make) -> None:
    config = config_of()
    drafter = started(
        make(config, Table(5)),
        free=sampling_params(config), forced=sampling_params(config, regex=LONG),
    )  # fmt: skip
    plain = V2(config, Table(5), guided=False)
    plain.add("free", sampling_params(config))
    found = drafter.step({"free": [11], "forced": encode("x")})
    assert found["free"] == plain.step({"free": [11]})["free"]
    assert found["forced"] == encode(WORDS * 2)[:NUM_DRAFT]


def test_forced_tokens_that_the_drafter_does_not_know(make: Make) -> None:
    config, forced = config_of(), encode(WORDS * 2)[:NUM_DRAFT]
    known = torch.tensor([token for token in range(VOCABULARY) if token not in forced])
    drafter = started(make(config, Table(7, known)), request=sampling_params(config, regex=LONG))
    assert drafter.step({"request": encode("x")})["request"] == forced


@pytest.mark.parametrize("speculative", [{}, {"draft_sample_method": "probabilistic"}])
def test_graphs_that_would_draw_what_is_known_are_not_run(speculative: dict[str, Any]) -> None:
    config = config_of(**speculative)
    drafter = started(
        V2(config, letters_table(), graphs="step"),
        whole=sampling_params(config, regex=LONG),
        part=sampling_params(config, regex='x"sky[abc]{9}'),
        free=sampling_params(config),
    )
    graphs, forced = drafter.drafter.decode_cudagraph_manager, encode(WORDS * 2)[:NUM_DRAFT]
    # How many of the loop's are run: none where nobody needs them, and where q is one-hot, all.
    replays = []
    for other in ({}, {"part": encode("x")}, {"free": [11]}):
        counted = _counted(graphs)
        drafter.add("whole", sampling_params(config, regex=LONG))
        drafter.wait("whole")
        found = drafter.step(
            {"whole": encode("x"), **other}, temperature=1.0 if speculative else 0.0
        )
        assert found["whole"] == forced
        replays.append(counted())
    assert replays == [NUM_DRAFT - 1 if speculative else 0, NUM_DRAFT - 1, NUM_DRAFT - 1]
    if speculative:
        slot = drafter._slots["whole"]
        probs = drafter.drafter.draft_logits[slot].softmax(-1)
        assert probs.argmax(-1).tolist() == forced
        assert bool((probs.amax(-1) == 1).all())


@pytest.mark.parametrize("split", ["data_parallel_size", "tensor_parallel_size"])
def test_ranks_that_share_a_model_run_every_graph(split: str) -> None:
    config = config_of()
    setattr(config.parallel_config, split, 2)
    params = sampling_params(config, regex=LONG)
    drafter = V2(config, letters_table(), graphs="step")
    assert drafter.drafting._draft is None
    if split == "data_parallel_size":
        return  # its ranks agree on a batch first, which takes processes
    graphs = started(drafter, request=params).drafter.decode_cudagraph_manager
    counted = _counted(graphs)
    assert drafter.step({"request": encode("x")})["request"] == encode(WORDS * 2)[:NUM_DRAFT]
    assert counted() == NUM_DRAFT - 1


def _counted(graphs: Any) -> Callable[[], int]:
    """How many replays there were since."""
    own = graphs.run_fullgraph.args[0].__self__
    before = own.num_replays
    return lambda: own.num_replays - before


def test_the_host_does_not_wait_for_what_it_knows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    drafter = started(
        make(config, letters_table()), request=sampling_params(config, regex='x"sky[abc]{9}')
    )
    masks, asked = drafter.drafting._masks, list[int]()
    drafted: Callable[[int, int], torch.Tensor] = masks._drafted

    def note(before: int, count: int) -> torch.Tensor:
        asked.append(before)
        return drafted(before, count)

    monkeypatch.setattr(masks, "_drafted", note)
    drafter.step({"request": encode("x")})
    assert asked == [*range(len(encode('"sky')), NUM_DRAFT - 1)]


def test_what_is_kept_of_a_request_ends_with_it(make: Make) -> None:
    config = config_of()
    drafter = started(make(config, letters_table()), request=sampling_params(config, regex=LONG))
    drafter.step({"request": encode("x")})
    known = drafter.drafting._forced._proposer._known
    assert known
    drafter.remove("request")
    drafter.add("other", sampling_params(config))
    drafter.step({"other": [11]})
    assert not known
