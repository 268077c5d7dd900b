"""A scope that cannot be entered leaves every group's collectives where they went before."""

from __future__ import annotations

from typing import Any

import pytest

from ncclguard.process_group import redirection


class Target:
    """A guarded group, as far as a scope enters and leaves it."""

    def __init__(self) -> None:
        self.scopes, self.one_by_one = 0, False

    def enter_scope(self, limit: float | None, failed: Any) -> None:
        self.scopes += 1

    def leave_scope(self) -> None:
        self.scopes -= 1


def test_a_group_that_cannot_be_redirected_leaves_none_of_the_others_redirected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, groups = Target(), ("first", "second")
    updates: list[int] = []

    def target_of(group: str) -> Target:
        if group == "second":
            raise RuntimeError("destroyed meanwhile")
        return target

    monkeypatch.setattr(redirection, "_target_of", target_of)
    monkeypatch.setattr(redirection, "_update", lambda: updates.append(len(redirection._routes)))
    scope = redirection.redirected()
    monkeypatch.setattr(scope, "_groups", groups)
    with pytest.raises(RuntimeError, match="destroyed meanwhile"), scope:
        pytest.fail("entered")
    assert (target.scopes, target.one_by_one, dict(redirection._routes), updates) == (0, False, {}, [0])
