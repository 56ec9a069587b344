"""What the versions of transformers differ in, and which of them the engine was tested with.

Models are run by what transformers keeps inside: its caches, masks and attention interfaces. A
minor version may change these. Each model is tried where it is loaded, and refused if it would
write other texts, so such a version is warned about. The next major version is refused: pip does
not install it with this package, and imports would fail one by one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from guided_spec.errors import ModelError

logger = logging.getLogger(__name__)


class Version(NamedTuple):
    """Major and minor number."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST, NEWEST = Version(5, 17), Version(5, 24)  # that were tested

# What a forward calls its keys and values: since 5.24, and before it.
CACHE_NAMES = ("cache", "past_key_values")


def check_transformers() -> None:
    """Log a warning for a version that was not tested.

    Raises ModelError, naming the versions, for the next major one.
    """
    installed = importlib.metadata.version("transformers")
    version = _installed()
    tested = f"guided_spec was tested with transformers {OLDEST} to {NEWEST}"
    if version.major > NEWEST.major:
        fix = f"pip install 'transformers>={OLDEST},<{NEWEST.major + 1}'"
        raise ModelError(f"{tested} and cannot run {installed}, which is installed: {fix}")
    if not OLDEST <= version <= NEWEST:
        text = "%s; %s is installed. Models that it runs differently are refused when they load."
        logger.warning(text, tested, installed)


def name_of_cache(forward: Callable[..., Any]) -> str | None:
    """The argument by which ``forward`` takes its keys and values; None: it names none.

    Code in a checkpoint may keep the old name with a new transformers.
    """
    arguments = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in arguments), None)


def cache_keyword(module: Any, cache: Any) -> dict[str, Any]:
    """``cache`` as the keyword argument of ``module``, by the name that its forward has for it.

    One that takes any keyword hands them on to transformers' own modules, and so gets their name.
    """
    forward = type(module).forward
    return {_keyword_of(forward): cache}


def cache_of(output: Any) -> Any:
    """The cache in what a forward returned; None where it keeps none."""
    names = (*CACHE_NAMES, "cache_params")
    return next((output[name] for name in names if output.get(name) is not None), None)


@functools.cache
def _keyword_of(forward: Callable[..., Any]) -> str:
    return name_of_cache(forward) or CACHE_NAMES[_installed() < Version(5, 24)]


def _installed() -> Version:
    found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("transformers"))
    return NEWEST if found is None else Version(int(found[1]), int(found[2]))
