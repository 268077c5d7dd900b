"""An incident as text: who, why, where, and what to do, for a person who was woken by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ncclguard.outcome import Cause

if TYPE_CHECKING:
    from ncclguard.incident.model import Incident, RankReport

#: Frames of a culprit's stack that are shown, the innermost; all are in the JSON.
SHOWN_FRAMES = 8
#: Culprits, sides and groups of waiting ranks that are shown one by one.
SHOWN_GROUPS = 8
#: How the note of one of many culprits that are at the same place begins; the number
#: of the rank that has the stack follows.
SAME_STACK = "its stack is that of rank "

#: What each cause means, in words.
MEANING = {
    Cause.LATE: "alive, but running other code: it has not entered this operation",
    Cause.DIVERGED: "in another collective than the others, or the same with another shape, dtype, reduce op or source",
    Cause.FAILED: "raised an exception while the others waited",
    Cause.EXITED: "left while the others waited",
    Cause.LOST: "its process or host is gone",
    Cause.STUCK: "its process exists, but its interpreter does not run",
    Cause.NETWORK: "every rank was there; the transfer itself stalled or broke",
    Cause.UNKNOWN: "there is no evidence",
}

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


def as_text(incident: Incident) -> str:
    """Return the incident as several lines; control characters that came from other programs' messages are escaped."""
    culprits = [report for report in incident.ranks if report.rank in incident.culprits]
    lines = [f"ncclguard incident {incident.id}: {incident.summary}"]
    lines.append(f"  cause: {incident.cause}, {MEANING[incident.cause]}")
    if len(culprits) > SHOWN_GROUPS:
        culprits.sort(key=lambda report: not (report.stack or report.exception))
    for report in culprits[:SHOWN_GROUPS]:
        lines += _culprit(report)
    rest = culprits[SHOWN_GROUPS:]
    alike = [report.rank for report in rest if SAME_STACK in (report.note or "")]
    if alike:
        lines.append(f"  and {ranks_text(alike)}, each at the same place as a rank above: see to_json()")
    if len(rest) > len(alike):
        lines.append(f"  and {ranks_text({report.rank for report in rest} - {*alike})}: see to_json()")
    unreported = sorted(set(incident.culprits) - {report.rank for report in culprits})
    if unreported:
        lines.append(f"  {ranks_text(unreported)}: nothing more is known")
    lines += _sides(incident.sides)
    lines += _waiting([report for report in incident.ranks if report.rank not in incident.culprits])
    limit = "" if incident.timeout is None else f"limit {duration(incident.timeout)}, "
    passed = "passed" if incident.deadline_expired else "not passed"
    lines.append(f"  time: {limit}deadline {passed}; tries: {incident.attempts}")
    if incident.torn:
        lines.append("  the tensor is torn: it holds neither its input nor the result")
    if not incident.agreed:
        lines.append("  this is the view of one rank: it could not agree with the others")
    if incident.device is not None:
        lines.append(f"  device: {incident.device}")
    lines.append(f"  what to do: {incident.advice}")
    lines.append(f"  (operation {incident.op_id}, group {incident.group}, generation {incident.generation})")
    return "\n".join(lines).translate(_CONTROL)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for people, runs shortened.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 5]), ranks_text([])
    ('rank 3', 'ranks 0-2, 5', 'no rank')
    """
    numbers = sorted(set(ranks))
    if not numbers:
        return "no rank"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(parts) > 2 * SHOWN_GROUPS:
        parts = [*parts[: 2 * SHOWN_GROUPS], f"... ({len(numbers)} in all)"]
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(parts)}"


def _culprit(report: RankReport) -> list[str]:
    cause = report.cause or Cause.UNKNOWN
    lines = [f"  rank {report.rank}{f' ({report.place})' if report.place else ''}: {cause}"]
    if report.exception:
        lines.append(f"    raised {_indented(report.exception)}")
    if report.note:
        lines.append(f"    {_indented(report.note)}")
    if report.operation:
        line = f"    {'in' if report.inside else 'last was in'} {report.operation}"
        line += f", called at {report.call_site}" if report.call_site else ""
        lines.append(line + (f", for {duration(report.age)}" if report.inside and report.age is not None else ""))
    if report.stack:
        left_out = len(report.stack) - SHOWN_FRAMES
        lines.append(
            "    main thread, innermost last" + (f" ({left_out} outer frames left out):" if left_out > 0 else ":")
        )
        lines += [f"      {_indented(frame)}" for frame in report.stack[-SHOWN_FRAMES:]]
        if report.threads:
            lines.append(f"    and {len(report.threads)} other thread{'s' * (len(report.threads) > 1)}: see to_json()")
    elif cause in (Cause.LATE, Cause.DIVERGED) and SAME_STACK not in (report.note or ""):
        lines.append("    stack: unknown, the rank sent none")
    return lines


def _sides(sides: Sequence[tuple[str, tuple[int, ...]]]) -> list[str]:
    lines = [f"  {ranks_text(ranks)} called {text}" for text, ranks in sides[:SHOWN_GROUPS]]
    if len(sides) > SHOWN_GROUPS:
        lines.append(f"  and {len(sides) - SHOWN_GROUPS} further calls: see to_json()")
    return lines


def _waiting(reports: Sequence[RankReport]) -> list[str]:
    """What the ranks that are not to blame were in, and for how long; ranks in the same place share a line."""
    places: dict[tuple[str, str], list[RankReport]] = {}
    for report in reports:
        if report.inside:
            place = (report.operation or "the operation", report.call_site or "")
            places.setdefault(place, []).append(report)
    lines = []
    for (operation, call_site), group in sorted(places.items(), key=lambda item: -len(item[1]))[:SHOWN_GROUPS]:
        ages = [report.age for report in group if report.age is not None]
        since = f" for {'up to ' if len(group) > 1 else ''}{duration(max(ages))}" if ages else ""
        where = f", called at {call_site}" if call_site else ""
        lines.append(f"  waiting{since}: {ranks_text(report.rank for report in group)} in {operation}{where}")
    if len(places) > SHOWN_GROUPS:
        lines.append(f"  and ranks waiting in {len(places) - SHOWN_GROUPS} further places: see to_json()")
    silent = [report.rank for report in reports if report.state == "silent"]
    if silent:
        lines.append(f"  no answer from {ranks_text(silent)}")
    return lines


def duration(seconds: float) -> str:
    """Seconds, with minutes beside them where that helps."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s ({seconds / 60:.3g} min)"


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n      ")
