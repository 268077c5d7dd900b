"""Settings that a group changed while it ran: agreed on by its ranks at an exchange, in force for its later calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ncclguard.config import GuardConfig

#: The settings that can change in a running job, in the order of the exchange. All hold from the next call on.
#:
#: Each decides when or how an operation ends, never what its end means: what a failure leaves behind (`atomic`),
#: whether a result may be without a rank (`on_lost`), and what raises (`on_failure`) are relied on by the program. A
#: setting is in only if ranks that all change it after the same operation decide alike afterwards. An exchange has two
#: numbers for each, see `statistics.LAYOUT`.
SETTINGS = (
    "timeout", "timeout_train", "timeout_eval", "timeout_small", "chunk_numel", "max_attempts", "stuck_timeout", "warn_after",
)  # fmt: skip
#: Those that count something, and are compared with every operation.
COUNTS = frozenset({"chunk_numel", "max_attempts"})
#: Those that may differ between ranks for a moment.
LIMITS = tuple(name for name in SETTINGS if name not in COUNTS)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one group that replace the configuration's, equal on all its ranks; None means not set.

    `proposal`: number of the newest proposal adopted. `rate` (bytes/s) and `direction` (1 longer, -1 shorter, 0
    settled) are the memory of the search for the best length of a piece, see `ncclguard.metrics.exchange`.
    """

    values: tuple[tuple[str, float | None], ...] = ()
    proposal: int = 0
    rate: float = 0.0
    direction: int = 1

    def has(self, name: str) -> bool:
        return any(key == name for key, _ in self.values)

    def get(self, name: str) -> float | None:
        """Return the value in force; None where there is none."""
        return dict(self.values).get(name)

    def changed(self) -> Mapping[str, float | None]:
        return dict(self.values)


UNCHANGED = Settings()


class AdjustedConfig:
    """The configuration of one group: the process's, with what the group's exchange has changed in it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._changes = {
            name: int(value) if name in COUNTS and value is not None else value for name, value in settings.values
        }
        self._made: tuple[GuardConfig, GuardConfig] | None = None

    def over(self, config: GuardConfig) -> GuardConfig:
        """Return `config` with the changes, made once for it; not validated again: all ranks must take it."""
        made = self._made
        if made is None or made[0] is not config:
            made = self._made = (config, config.model_copy(update=self._changes))
        return made[1]


#: Name of the process group -> its changed settings; empty in jobs that change none, which costs their calls nothing.
adjusted: dict[str, AdjustedConfig] = {}


def apply(group: str, settings: Settings, names: tuple[str, ...] = SETTINGS) -> None:
    """Give later calls of a process group these settings; those that are not among `names` stay."""
    if names != SETTINGS and group in adjusted:
        kept = {name: value for name, value in adjusted[group].settings.values if name not in names}
        settings = replace(settings, values=tuple({**kept, **dict(settings.values)}.items()))
    if settings.values:
        adjusted[group] = AdjustedConfig(settings)
    else:
        adjusted.pop(group, None)


def shown(value: float | None) -> str:
    """Return a setting's value as people write it."""
    return "not set" if value is None else f"{value:g}"


def config_of(process_group: str, config: GuardConfig) -> GuardConfig:
    """Return the configuration of calls on a process group: `config`, with the changes of the group."""
    changed = adjusted.get(process_group)
    return config if changed is None else changed.over(config)
