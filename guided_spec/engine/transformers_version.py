"""Whether the installed transformers is one that the engine was tested with.

Models are run by what transformers keeps inside: its caches, masks and attention interfaces. A
minor version may change these. Each model is tried where it is loaded, and refused if it would
write other texts, so such a version is warned about. The next major version is refused: pip does
not install it beside this package, and imports would fail one by one.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import NamedTuple

from guided_spec.errors import ModelError

__all__ = ["NEWEST", "OLDEST", "Version", "check_transformers"]

logger = logging.getLogger(__name__)


class Version(NamedTuple):
    """Major and minor number."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST, NEWEST = Version(5, 17), Version(5, 23)  # that were tested


def check_transformers() -> None:
    """Log a warning for a version that was not tested.

    Raises ModelError, naming the versions, for the next major one.
    """
    installed = importlib.metadata.version("transformers")
    found = re.match(r"(\d+)\.(\d+)", installed)
    version = NEWEST if found is None else Version(int(found[1]), int(found[2]))
    tested = f"guided_spec was tested with transformers {OLDEST} to {NEWEST}"
    if version.major > NEWEST.major:
        fix = f"pip install 'transformers>={OLDEST},<{NEWEST.major + 1}'"
        raise ModelError(f"{tested} and cannot run {installed}, which is installed: {fix}")
    if not OLDEST <= version <= NEWEST:
        text = "%s; %s is installed. Models that it runs differently are refused when they load."
        logger.warning(text, tested, installed)
