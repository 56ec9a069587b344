from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from guided_spec.integrations.lmdeploy.plugin import install, uninstall
from tests.integrations.lmdeploy.world import world


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """LMDeploy's modules with our plugin in them."""
    modules = world(monkeypatch)
    install()
    yield modules
    uninstall()
