"""Grammars behind reasoning: workers find where it ends as vLLM's scheduler does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm import guard as vllm_guard  # noqa: E402
from guided_spec.integrations.vllm.backend import VllmGrammars  # noqa: E402
from guided_spec.integrations.vllm.reasoning import (  # noqa: E402
    Bounds,
    Reasoning,
    ReasoningSpan,
    report_reasoning,
)
from guided_spec.integrations.vllm.requests import GrammarRequests  # noqa: E402
from tests.integrations.vllm.guarded import (  # noqa: E402
    Make,
    NewRunner,
    Runner,
    World,
    add_parser,
    ids,
)
from tests.integrations.vllm.parts import (  # noqa: E402
    PROMPT,
    RELEASE,
    make_config,
    next_step,
    sampling_params,
    tokenizer,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

STILL = {"x": "u", "y": "u"}
DRAFTS = {"x": "vab", "y": "uvh"}
ANY = "any"
ROWS = {"x": [ANY, "a", "bc", "d"], "y": [ANY, ANY, "h", "ij"]}


@pytest.fixture(params=[Runner, NewRunner])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def config() -> Any:
    return make_config(outputs={"reasoning_parser": add_parser()})


def reasoning(make: Make) -> World:
    return World(make, DRAFTS, history="still reasoning", written=STILL)


def rows_of(world: World, output: Any) -> dict[str, list[str]]:
    found = {}
    for name, draft in world.drafts.items():
        is_open = (world.rows(output, name)[: len(draft) + 1] == -1).all(-1)
        letters = world.legal(output, name)
        found[name] = [ANY if free else one for free, one in zip(is_open, letters, strict=True)]
    return found


def requests_of(world: World) -> GrammarRequests:
    guard = vllm_guard.guard_of(world.runner)
    assert guard is not None
    return guard.requests


def test_rows_of_reasoning_and_of_the_draft_that_ends_it_are_left_alone(make: Make) -> None:
    world = reasoning(make)
    assert rows_of(world, world.output) == ROWS
    assert world.check() is world.output


def test_rows_behind_the_draft_that_ends_reasoning_are_filled_anew(make: Make) -> None:
    world = reasoning(make)
    world.rows(world.output, "x")[1:] = -1
    world.rows(world.output, "y")[2] = -1
    assert rows_of(world, world.check()) == ROWS


def test_a_request_that_the_scheduler_does_not_name_gets_the_same(make: Make) -> None:
    world = reasoning(make)
    world.output = None
    assert rows_of(world, world.check()) == ROWS


def test_reasoning_that_goes_on_needs_no_masks(make: Make) -> None:
    world = World(make, {"x": "uu", "y": "uu"}, history="still reasoning", written=STILL)
    world.output = None
    assert world.check() is None


def test_an_end_inside_of_a_step_binds_what_follows(make: Make) -> None:
    """Older releases look at a step's last token alone, and have no masks from there on."""
    world = reasoning(make)
    written = {"x": ids("va"), "y": ids("uvh")}
    world.runner.note(["x", "y"], [[*written["x"], -1], written["y"]])
    world.drafts = {"x": ids("b"), "y": ids("i")}
    world.step = next_step(world.scheduler, world.step.scheduled, written, {**world.drafts})
    world.output = world.step.grammar
    assert rows_of(world, world.check()) == {"x": ["bc", "d"], "y": ["ij", "k"]}


def test_grammars_stand_behind_the_reasoning(make: Make) -> None:
    found = requests_of(World(make, history="reasoning")).stand(["x", "y"])
    assert [one and one.committed for one in found] == [ids("a"), ids("h")]


@pytest.mark.skipif(RELEASE >= (0, 27), reason="newer releases find it")
def test_without_the_guard_such_an_end_is_lost(make: Make) -> None:
    world = reasoning(make)
    written = {"x": ids("va"), "y": ids("uvh")}
    drafts = {"x": ids("b"), "y": ids("i")}
    step = next_step(world.scheduler, world.step.scheduled, written, drafts)
    assert (step.grammar.grammar_bitmask == -1).all()


def test_a_text_that_is_set_anew_is_read_from_its_beginning() -> None:
    requests = requests_of(World(Runner, history="reasoning"))
    requests.restate("x", ids("uuu"))
    assert requests.stand(["x"]) == [None]
    requests.restate("x", ids("uuuva"))
    (found,) = requests.stand(["x"])
    assert found is not None
    assert found.committed == ids("a")


def test_a_token_of_the_grammar_may_end_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar reads it, though it was drawn freely."""
    world = World(Runner, {"x": "ab", "y": "hi"}, history="still reasoning", written=STILL)
    monkeypatch.setattr(ReasoningSpan, "bounds", lambda *_: Bounds(0, 1))
    monkeypatch.setattr(ReasoningSpan, "start_in", lambda *_: None)
    world.output = None
    assert rows_of(world, world.check()) == {"x": [ANY, "bc", "d"], "y": [ANY, "ij", "k"]}


def span_of(told: Any, prompt: Any) -> ReasoningSpan | None:
    """As a worker has it. told: whether it has ended, and the parser's options."""
    params = sampling_params(make_config(), regex="a+")
    wanted = SimpleNamespace(reasoning_ended=told[0], reasoning_parser_kwargs=told[1])
    request = SimpleNamespace(sampling_params=params, structured_output_request=wanted)
    report_reasoning(lambda *_: None)(SimpleNamespace(reasoner_cls=object), request)
    return VllmGrammars(config()).span_of(params, prompt)


def test_the_front_end_has_the_first_word_and_the_prompt_the_second() -> None:
    ended = [*PROMPT, *ids("v")]
    assert span_of((True, None), PROMPT) is None
    assert span_of((False, None), ended) is not None
    assert span_of((None, None), ended) is None
    assert span_of((None, None), PROMPT) is not None


def test_the_parser_gets_the_options_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Reasoning.of(config(), tokenizer())
    assert own is not None
    parser, seen = own._parser, dict[str, Any]()

    def kept(**options: Any) -> Any:
        seen.update(options)
        return parser(tokenizer=options["tokenizer"])

    monkeypatch.setattr(own, "_parser", kept)
    params = sampling_params(make_config(), regex="a+")
    params.extra_args = {"guided_spec_reasoning": (None, {"enable_thinking": True})}
    assert own.span(params, PROMPT) is not None
    assert seen["enable_thinking"]


def test_without_a_parser_or_with_grammars_in_reasoning_there_is_none() -> None:
    within = {"reasoning_parser": add_parser(), "enable_in_reasoning": True}
    for outputs in (None, within):
        grammars = VllmGrammars(make_config(outputs=outputs))
        assert grammars.span_of(sampling_params(make_config(), regex="a+"), PROMPT) is None
