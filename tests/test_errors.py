from __future__ import annotations

import copy
import pickle

import pytest

from guided_spec import errors
from guided_spec.errors import BudgetTooSmallError, ConfigError, GuidedSpecError


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_are_copied_as_they_are(name: str) -> None:
    """Remembered ones are raised as copies, and some come from another process."""
    kind = getattr(errors, name)
    made: GuidedSpecError
    if issubclass(kind, ConfigError):
        made = kind("n", 0, "pass more")
    elif kind is BudgetTooSmallError:
        made = kind(3, 7)
    elif kind is errors.TrainingStoppedError:
        made = kind("SIGTERM", 15, 4, "folder")
    elif kind is errors.TextCutShortError:
        made = kind(9, 4)
    else:
        made = kind("why")
    for other in (copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert type(other) is kind
        assert str(other) == str(made)
        assert vars(other) == vars(made)
