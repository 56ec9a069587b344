"""What every test runs under: offline, few threads, repeatable, and with poisoned memory."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.durations import DurationsWriter, note_call, note_end, note_start
from tests.tiers import leave_to_the_full_tier, load_profile

# What ``with torch.device(...)`` acts on, remembered before the tests' own allocators replace it.
_device_constructors()

# Hypothesis also draws constants out of the modules that happen to be imported when a test starts,
# which depends on the tests before it: the same test would see other examples in other runs.
providers._get_local_constants = Constants


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long tests take is written on request."""
    parser.addoption(
        "--write-durations", type=Path, help="a file for what tests take (tests/durations.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module imports transformers, which reads these variables."""
    load_profile(config)
    path, is_main = config.getoption("--write-durations"), not hasattr(config, "workerinput")
    if path is not None and is_main:
        config.pluginmanager.register(DurationsWriter(path, config.invocation_params.args))
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True  # a folder's conftest may have imported it before
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    torch.set_num_threads(1 if is_worker else 2)
    _set_defaults(os.environ.get("GUIDED_SPEC_TEST_TABLES", "off"))


def _set_defaults(grammar_tables: str) -> None:
    """What ``EngineConfig`` has unless told: no clock decides whether a step drafts, and no process
    makes tables beside tests.

    grammar_tables: "always" puts the whole suite on tables, wherever they apply.
    """
    from guided_spec.config import EngineConfig  # behind the variables above

    defaults: Any = EngineConfig.__init__.__kwdefaults__
    for name, value in (("grammar_tables", grammar_tables), ("drafting", "always")):
        assert name in defaults
        defaults[name] = value


@pytest.hookimpl(tryfirst=True)  # before items are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick tier takes few cases of a test; tests of a GPU are skipped where there is none."""
    leave_to_the_full_tier(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What an item takes counts from here."""
    note_start(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """What it takes itself counts from here."""
    note_call(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """What an item took goes with its last report."""
    report = yield
    note_end(item, report)
    return report


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A test that makes loggers say more, or say it elsewhere, leaves no other one with that."""
    loggers = [logging.getLogger(name) for name in (None, "guided_spec")]
    before = [(logger, logger.level, [*logger.handlers]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        for handler in [*logger.handlers]:
            if handler not in handlers:
                logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh floating-point CPU memory holds NaN, so that a result that reads it is noticed."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        memory = allocate(*args, **kwargs)
        if memory.device.type == "cpu" and memory.is_floating_point():
            with torch.no_grad():
                memory.fill_(torch.nan)
        return memory

    return allocate_poisoned


@pytest.fixture
def drafted_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text has its first token drafted for.

    Else one has not that comes while nobody decodes, and in which step a text comes is chance: for
    tests that compare the drafts of several texts.
    """
    monkeypatch.setattr(
        "guided_spec.engine.steps.planner.Planner.decodes_with_prompt", lambda *_: False
    )
