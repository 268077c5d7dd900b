"""One line of the doctor's table, and how the lines of many ranks become one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["ok", "warning", "error", "skipped"]
_WORST_LAST: tuple[Status, ...] = ("skipped", "ok", "warning", "error")


class Check(BaseModel):
    """A check: its name, how it came out, the figures, and what to do next (empty when there is nothing to do)."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: Status
    detail: str
    advice: str = ""


def ok(name: str, detail: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name=name, status="ok", detail=detail)


def warning(name: str, detail: str, advice: str) -> Check:
    """Something that can make a job slow or fragile."""
    return Check(name=name, status="warning", detail=detail, advice=advice)


def error(name: str, detail: str, advice: str) -> Check:
    """Something that makes a job fail or hang."""
    return Check(name=name, status="error", detail=detail, advice=advice)


def skipped(name: str, detail: str) -> Check:
    """A check that had nothing to look at; the detail says why."""
    return Check(name=name, status="skipped", detail=detail)


def worst(statuses: Iterable[Status]) -> Status:
    """The gravest of them; "skipped" when there is none."""
    return max(statuses, key=_WORST_LAST.index, default="skipped")


def merge(by_host: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """One check for each name, from (host, its checks); hosts that differ are named, equal ones are not repeated."""
    names = list(dict.fromkeys(check.name for _, checks in by_host for check in checks))
    return [_merge_one(name, by_host) for name in names]


def _merge_one(name: str, by_host: Sequence[tuple[str, Sequence[Check]]]) -> Check:
    found = [(host, check) for host, checks in by_host for check in checks if check.name == name]
    status = worst(check.status for _, check in found)
    # Where something is wrong, only that is shown; hosts of which the same is said share a line.
    shown = [(host, check) for host, check in found if check.status == status]
    hosts_by_detail: dict[str, list[str]] = {}
    for host, check in shown:
        hosts_by_detail.setdefault(check.detail, []).append(host)
    everywhere = len(hosts_by_detail) == 1 and len({host for host, _ in shown}) == len({host for host, _ in by_host})
    parts = [
        detail if everywhere else f"{', '.join(dict.fromkeys(hosts))}: {detail}"
        for detail, hosts in hosts_by_detail.items()
    ]
    advice = "; ".join(dict.fromkeys(check.advice for _, check in shown if check.advice))
    return Check(name=name, status=status, detail="\n".join(parts), advice=advice)


def exit_code(checks: Iterable[Check], *, fail_on_warnings: bool) -> int:
    """2 when something is an error, 1 when something is a warning and that was asked for, else 0."""
    status = worst(check.status for check in checks)
    if status == "error":
        return 2
    return 1 if status == "warning" and fail_on_warnings else 0
