"""Grammar backends by name: how one joins, how it is found, and where it compiles."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.config import EngineConfig
from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.registry import (
    ENTRY_POINT_GROUP,
    GRAMMAR_BACKENDS,
    find_grammar_backend,
    grammar_backend_names,
    import_path,
    importable_backends,
    register_grammar_backend,
)
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.pipeline import GrammarPipeline, RequestGrammars
from guided_spec.grammar.protocol import GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from tests.grammar.backends.own_backends import Handing, Listed
from tests.grammar.hostile import HostileBackend, large
from tests.masks.walks import BYTES, accepts, walk
from tests.tiny_llm import make_llm, tiny_tokenizer

WORDS = GrammarSpec.choice(["red", "green"])
HOW = "register another with .*register_grammar_backend.*group guided_spec.grammar_backends"
NEEDS_WORKERS = pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(GRAMMAR_BACKENDS)
    yield
    GRAMMAR_BACKENDS.clear()
    GRAMMAR_BACKENDS.update(before)


def test_the_built_in_ones_are_names_like_any_other() -> None:
    assert grammar_backend_names() == ["auto", "llguidance", "xgrammar"]
    assert find_grammar_backend("backend", "xgrammar") is XGrammarBackend


@pytest.mark.parametrize("factory", [Listed, "tests.grammar.backends.own_backends:Listed"])
def test_a_registered_backend_compiles_what_asks_for_it(factory: Any) -> None:
    register_grammar_backend("listed", factory)
    assert grammar_backend_names() == ["auto", "listed", "llguidance", "xgrammar"]
    for backend, spec in (
        (BackendChoice("listed", BYTES), WORDS),
        (BackendChoice("xgrammar", BYTES), WORDS.with_backend("listed")),
    ):
        compiled = backend.compile(spec)
        assert getattr(compiled, "backend", "") == "listed"
        assert accepts(compiled, "green")
        assert not accepts(compiled, "gree")
        with pytest.raises(GrammarCompileError, match="listed compiles choice, not regex"):
            backend.compile(GrammarSpec.regex("a").with_backend("listed"))
        other = backend.compile(WORDS.with_backend("xgrammar"))
        assert getattr(other, "backend", "") == "xgrammar"


def test_a_backend_may_hand_on_what_it_gets() -> None:
    """The grammar is then xgrammar's own, with all that belongs to one."""
    register_grammar_backend("handing", Handing)
    compiled = BackendChoice("handing", BYTES).compile(WORDS.with_backend("handing"))
    assert getattr(compiled, "backend", "") == "xgrammar"
    assert accepts(compiled, "red")


@pytest.mark.parametrize("name", ["", "a:b", "a+b", None, 7])
def test_names_that_are_none(name: Any) -> None:
    with pytest.raises(ConfigError, match="name=.*non-empty name without"):
        register_grammar_backend(name, Listed)


def test_a_name_that_is_taken() -> None:
    register_grammar_backend("listed", Listed)
    for name in ("listed", "auto"):
        with pytest.raises(ConfigError, match=f"name='{name}': is taken.*GRAMMAR_BACKENDS"):
            register_grammar_backend(name, Listed)
    del GRAMMAR_BACKENDS["listed"]
    register_grammar_backend("listed", Handing)


@pytest.mark.parametrize("factory", [None, 7, "module", "module:", ":Class", ""])
def test_factories_that_are_none(factory: Any) -> None:
    with pytest.raises(ConfigError, match=r"factory=.*callable that takes a Vocabulary"):
        register_grammar_backend("mine", factory)
    assert "mine" not in GRAMMAR_BACKENDS


def test_names_that_nobody_registered() -> None:
    known = "must be one of auto, listed, llguidance, xgrammar; " + HOW
    register_grammar_backend("listed", Listed)
    with pytest.raises(ConfigError, match=f"backend='mine': {known}"):
        WORDS.with_backend("mine")
    for build in (
        lambda: BackendChoice("mine", BYTES),
        lambda: make_llm("llama", grammar_backend="mine"),
    ):
        with pytest.raises(ConfigError, match=f"grammar_backend='mine': {known}"):
            build()
    spec = WORDS.with_backend("listed")
    del GRAMMAR_BACKENDS["listed"]
    with pytest.raises(ConfigError, match="^backend='listed': must be one of"):
        BackendChoice("auto", BYTES).compile(spec)


def test_an_unknown_name_is_said_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="grammar_backend='mine'"):
        make_llm("/no/such/model", grammar_backend="mine")


def test_a_name_that_is_registered_anew() -> None:
    """As in a notebook: what was made stays until the name has another factory."""
    register_grammar_backend("mine", Listed)
    choice = BackendChoice("auto", BYTES)
    spec = WORDS.with_backend("mine")
    assert getattr(choice.compile(spec), "backend", "") == "mine"
    del GRAMMAR_BACKENDS["mine"]
    assert getattr(choice.compile(spec), "backend", "") == "mine"
    register_grammar_backend("mine", Handing)
    assert getattr(choice.compile(spec), "backend", "") == "xgrammar"


@pytest.mark.parametrize("name", ["", None, 7])
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="grammar_backend=.*name of a grammar backend"):
        EngineConfig(grammar_backend=name)
    with pytest.raises(ConfigError, match="backend="):
        WORDS.with_backend(7)  # type: ignore[arg-type]


def _raise(_: Any) -> Any:
    raise ZeroDivisionError("no such table")


def _refuse(_: Any) -> Any:
    raise ConfigError("table", "x.txt", "no such file")


UNUSABLE: list[tuple[Any, str]] = [
    ("no_such_module:Mine", "its factory 'no_such_module:Mine' cannot be imported: No module"),
    ("tests.grammar.backends.own_backends:Nobody", "cannot be imported: .*Nobody"),
    ("tests.grammar.backends.own_backends:__doc__", "is not callable"),
    (_raise, "its factory failed: ZeroDivisionError: no such table"),
    (lambda: None, "its factory failed: TypeError: .*argument"),
    (lambda _: None, "its factory returned a NoneType without vocabulary, compile"),
    (lambda _: SimpleNamespace(vocabulary=1), "returned a SimpleNamespace without compile"),
]


@pytest.mark.parametrize(("factory", "message"), UNUSABLE)
def test_a_backend_that_cannot_be_made(factory: Any, message: str) -> None:
    register_grammar_backend("mine", factory)
    with pytest.raises(ConfigError, match=f"^grammar_backend='mine': .*{message}"):
        BackendChoice("mine", BYTES)
    with pytest.raises(ConfigError, match=f"^backend='mine': .*{message}"):
        BackendChoice("auto", BYTES).compile(WORDS.with_backend("mine"))


def test_what_a_factory_refuses_itself_goes_through() -> None:
    register_grammar_backend("mine", _refuse)
    for compile_ in (
        lambda: BackendChoice("mine", BYTES),
        lambda: BackendChoice("auto", BYTES).compile(WORDS.with_backend("mine")),
    ):
        with pytest.raises(ConfigError, match="^table='x.txt': no such file"):
            compile_()


def test_an_installed_package_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "listed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: listed\nVersion: 1.0\n")
    entry = f"[{ENTRY_POINT_GROUP}]\nlisted = tests.grammar.backends.own_backends:Listed\n"
    (info / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    assert "listed" in grammar_backend_names()
    assert "listed" not in GRAMMAR_BACKENDS
    assert import_path("listed") == "tests.grammar.backends.own_backends:Listed"
    compiled = BackendChoice("auto", BYTES).compile(WORDS.with_backend("listed"))
    assert accepts(compiled, "red")


def test_which_factories_another_process_can_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(Listed):
        pass

    class InScript(Listed):
        __module__ = "__main__"
        __qualname__ = "InScript"

    monkeypatch.setattr(sys.modules["__main__"], "InScript", InScript, raising=False)
    (tmp_path / "loaded_by_path.py").write_text("def make(vocabulary): return vocabulary\n")
    spec = importlib.util.spec_from_file_location("loaded_by_path", tmp_path / "loaded_by_path.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_by_path", module)
    spec.loader.exec_module(module)
    cases: list[tuple[Any, str | None]] = [
        (Listed, "tests.grammar.backends.own_backends:Listed"),
        ("module:Class", "module:Class"),
        (Local, None),
        (InScript, None),
        (partial(Listed), None),
        (lambda vocabulary: Listed(vocabulary), None),
        (module.make, None),
    ]
    for number, (factory, path) in enumerate(cases):
        register_grammar_backend(f"b{number}", factory)
        assert import_path(f"b{number}") == path
    assert import_path("nobody") is None
    assert {name for name in importable_backends() if name[0] == "b"} == {"b0", "b1"}


@pytest.mark.slow
@NEEDS_WORKERS
@pytest.mark.parametrize("name", ["hostile", "xgrammar"])
def test_what_can_be_imported_is_tried_out_in_a_process(name: str) -> None:
    """As the engine's own backend, and where a spec names it; registered before and after."""
    if name == "hostile":
        register_grammar_backend("hostile", HostileBackend)
    config = EngineConfig(grammar_backend=name)
    grammars = RequestGrammars.build(config, BYTES, tiny_tokenizer())
    with closing(grammars.queue) as queue:
        if name != "hostile":
            queue.submit(GrammarSpec.regex("[ab]{1,300}")).result(60)  # the worker has started
            register_grammar_backend("hostile", HostileBackend)
        spec = large("exit").with_backend(None if name == "hostile" else "hostile")
        with pytest.raises(GrammarCompileError, match="exit status 3"):
            queue.submit(spec).result(60)


@pytest.mark.slow
@NEEDS_WORKERS
@pytest.mark.parametrize("default", ["local", "auto"])
def test_what_cannot_be_imported_is_compiled_here(default: str) -> None:
    made: list[Listed] = []

    def make(vocabulary: Vocabulary) -> Listed:
        made.append(Listed(vocabulary))
        return made[-1]

    register_grammar_backend("local", make)
    config = EngineConfig(grammar_backend=default)
    words = GrammarSpec.choice([f"{number:03d}" for number in range(600)])
    wide = GrammarSpec.choice([f"{number:05d}" for number in range(10_001)])
    name = None if default == "local" else "local"
    grammars = RequestGrammars.build(config, BYTES, tiny_tokenizer())
    with closing(grammars.queue) as queue:
        isolated = queue._backend
        assert isinstance(isolated, GrammarPipeline)
        assert accepts(queue.submit(words.with_backend(name)).result(60), "599")
        assert not isolated._workers.pids
        assert [spec.source for spec in made[0].specs] == [words.source]
        with pytest.raises(GrammarCompileError, match="alternatives=10000"):
            queue.submit(wide.with_backend(name)).result(60)
        # What another backend compiles is tried out as ever.
        queue.submit(words.with_backend("xgrammar")).result(60)
        assert isolated._workers.pids


OWN = [XGrammarBackend(BYTES), LLGuidanceBackend(BYTES)]


@pytest.mark.parametrize("backend", OWN, ids=["xgrammar", "llguidance"])
@given(
    options=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        min_size=1,
        max_size=4,
    )
)
def test_choice_is_exactly_its_options(backend: GrammarBackend, options: list[str]) -> None:
    grammar = backend.compile(GrammarSpec.choice(options))
    assert all(accepts(grammar, option) for option in options)
    assert walk(grammar, 0).text in options
