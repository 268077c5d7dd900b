"""What all tests share: settings as if nobody had set any, and property tests that are the same in every run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from ncclguard import config

hypothesis.settings.register_profile("ncclguard", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ncclguard")


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts from the defaults, whatever the shell exports, and leaves them behind."""
    settings = {config.PREFIX + name.upper() for name in config.GuardConfig.model_fields}
    for name in settings & set(os.environ):
        monkeypatch.delenv(name)
    config.reset_config()
    yield
    config.reset_config()
