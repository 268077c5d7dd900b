"""What a group's settings become at an exchange: a pure function of what all ranks
have gathered, so the same on all of them.

First a proposal that somebody made (`ncclguard set`), then, if `adjust` is on, what the measurements suggest:

- A limit of a phase in which a deadline passed while everybody was alive, or which an operation has used up by half, is
  doubled.
- A limit is lowered, by half at most, to 20 times the longest operation seen, once enough were seen.
- Pieces become half as long when tries were repeated (less is done again). Else their length is doubled as long as that
  makes large operations faster, then halved likewise, then left alone.

All stay within the configured bounds, and nothing is changed by less than a factor of 1.25.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ncclguard.config import GuardConfig
from ncclguard.metrics.settings import SETTINGS, Settings
from ncclguard.metrics.statistics import PHASES, Combined

#: Share of a limit that an operation may use before the limit is raised.
NEAR = 0.5
#: A limit is not lowered below this many times the longest operation seen.
ROOM = 20.0
#: Successes of the group between two exchanges before a limit is lowered.
ENOUGH = 8
#: A change by less than this factor is not worth one.
WORTH = 1.25
#: A longer or shorter piece must change the rate by more than this to count as better or worse.
BETTER, WORSE = 1.05, 0.95
_LIMITS = {"none": "timeout", "train": "timeout_train", "eval": "timeout_eval", "small": "timeout_small"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Whether and how far the measurements may move settings; seconds and elements, equal on all ranks.

    `names`: the settings that can change at all in this group.
    """

    adjust: bool
    timeout: tuple[float, float]
    chunk_numel: tuple[int, int]
    names: tuple[str, ...] = SETTINGS

    @classmethod
    def of(cls, config: GuardConfig, names: tuple[str, ...] = SETTINGS) -> Bounds:
        """The bounds that are configured."""
        return cls(
            config.adjust,
            (config.adjust_timeout_min, config.adjust_timeout_max),
            (config.adjust_chunk_min, config.adjust_chunk_max),
            names,
        )


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting before and after, and why; None means not set."""

    name: str
    old: float | None
    new: float | None
    reason: str


def decide(gathered: Combined, bounds: Bounds) -> tuple[Settings, tuple[SettingChange, ...]]:
    """The settings of the group from now on, and what changes with them.

    The first rank's settings are where it starts from, so that a rank which missed an exchange is in step again after
    the next.
    """
    settings = gathered.first.settings
    settings, changes = _proposed(settings, gathered, bounds.names)
    if bounds.adjust:
        taken = {change.name for change in changes}
        for index, phase in enumerate(PHASES):
            if _LIMITS[phase] not in taken:
                settings, change = _limit(settings, gathered, index, bounds.timeout)
                changes += change
        if "chunk_numel" not in taken and "chunk_numel" in bounds.names:
            settings, change = _pieces(settings, gathered, bounds.chunk_numel)
            changes += change
    return settings, changes


def _proposed(
    settings: Settings, gathered: Combined, names: tuple[str, ...]
) -> tuple[Settings, tuple[SettingChange, ...]]:
    newest = gathered.newest
    if newest.proposal <= settings.proposal:
        return settings, ()
    changes = []
    proposed = [(name, value) for name, value in newest.proposed if name in names]
    for name, value in proposed:
        if settings.has(name) and settings.get(name) == value:
            continue  # a proposal contains those before it
        old = _in_force(name, settings, gathered)
        changes.append(SettingChange(name, old, value, f"set from outside, proposal {newest.proposal}"))
    settings = _with(settings, dict(proposed))
    return replace(settings, proposal=newest.proposal, rate=0.0, direction=1), tuple(changes)


def _limit(
    settings: Settings, gathered: Combined, index: int, bounds: tuple[float, float]
) -> tuple[Settings, tuple[SettingChange, ...]]:
    name = _LIMITS[PHASES[index]]
    limit, longest, expired = gathered.limits[index], gathered.longest[index], gathered.expired[index]
    if limit is None:
        return settings, ()  # by size: there is no one limit to move
    lowest, highest = bounds
    if expired:
        wanted, why = 2 * limit, f"a deadline passed {expired} times while all ranks were alive"
    elif longest > NEAR * limit:
        wanted, why = 2 * limit, f"an operation took {longest:.3g} s of {limit:g} s"
    elif 0.0 < longest * ROOM < limit and gathered.operations >= ENOUGH:
        wanted, why = max(ROOM * longest, limit / 2), f"no operation took more than {longest:.3g} s of {limit:g} s"
    else:
        return settings, ()
    wanted = min(max(wanted, lowest), highest)
    if (wanted > limit) != (expired > 0 or longest > NEAR * limit) or not _worth(limit, wanted):
        return settings, ()  # the bounds leave no room in that direction
    return _with(settings, {name: wanted}), (SettingChange(name, limit, wanted, why),)


def _pieces(
    settings: Settings, gathered: Combined, bounds: tuple[int, int]
) -> tuple[Settings, tuple[SettingChange, ...]]:
    if gathered.piece == 0:
        return settings, ()
    current = settings.get("chunk_numel") or float(gathered.piece)
    rate, before, direction = gathered.rate, settings.rate, settings.direction
    if gathered.retries:
        return _resize(replace(settings, rate=0.0), current, -1, 0, bounds, f"{gathered.retries} tries were repeated")
    if rate <= 0.0 or direction == 0:
        return settings, ()
    settings = replace(settings, rate=rate)
    why = f"large operations moved {rate / 1e9:.3g} GB/s, {before / 1e9:.3g} before"
    if before <= 0.0:
        why = f"large operations move {rate / 1e9:.3g} GB/s: looking whether another length is faster"
        return _resize(settings, current, direction, direction, bounds, why)
    if rate > before * BETTER:
        return _resize(settings, current, direction, direction, bounds, why)
    if rate < before * WORSE:  # back, and once the other way
        return _resize(settings, current, -direction, -1 if direction > 0 else 0, bounds, why)
    return replace(settings, direction=0), ()


def _resize(
    settings: Settings, current: float, step: int, direction: int, bounds: tuple[int, int], why: str
) -> tuple[Settings, tuple[SettingChange, ...]]:
    """Twice (`step` 1) or half (-1) the length, and where to look next; at a bound the search turns round or ends."""
    wanted = float(int(min(max(current * 2.0**step, bounds[0]), bounds[1])))
    if not _worth(current, wanted) or (wanted > current) != (step > 0):
        return replace(settings, direction=-1 if direction > 0 else 0), ()
    settings = _with(replace(settings, direction=direction), {"chunk_numel": wanted})
    return settings, (SettingChange("chunk_numel", current, wanted, why),)


def _in_force(name: str, settings: Settings, gathered: Combined) -> float | None:
    """What the first rank had: its limits are in the exchange, the rest is known only where it was changed before."""
    for index, phase in enumerate(PHASES):
        if _LIMITS[phase] == name:
            return gathered.first.limits[index]
    return settings.get(name)


def _with(settings: Settings, values: dict[str, float | None]) -> Settings:
    merged = {**dict(settings.values), **values}
    return replace(settings, values=tuple((name, merged[name]) for name in SETTINGS if name in merged))


def _worth(old: float, new: float) -> bool:
    return max(old, new) / min(old, new) >= WORTH
