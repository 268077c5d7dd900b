"""The time limits of a job: what each governs, its value in this environment, and the source of that value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.cells import cell_len

from ncclguard.config import PREFIX, GuardConfig
from ncclguard.environment.setup import Ladder, Rung
from ncclguard.environment.versions import Versions, within
from ncclguard_explain.language import joined, said, tr

#: The source of a limit where neither the program nor a variable sets it.
_ARGUMENT_ONLY = tr("default; no variable, only the argument")


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: its name, what it governs, its value now in words, and the source of that value."""

    name: str
    governs: str
    now: str
    origin: str


def limits_in_force(config: GuardConfig, ladder: Ladder, versions: Versions, environ: Mapping[str, str]) -> list[Limit]:
    """Return every time limit that a job may meet, with the defaults of limits that a program sets itself.

    >>> from ncclguard.environment.setup import compute_ladder
    >>> versions = Versions(torch="2.13.0", nccl="2.29.7", nccl_source="example")
    >>> config = GuardConfig(timeout=900)
    >>> for limit in limits_in_force(config, compute_ladder(1800, versions, {}), versions, {})[:1]:
    ...     print(limit.name, limit.now, sep=": ")
    timeout= of a call, else NCCLGUARD_TIMEOUT: 900 s
    """

    def setting(field: str) -> tuple[str, str]:
        variable = f"{PREFIX}{field.upper()}"
        value = getattr(config, field)
        given = next((name for name in environ if name.upper() == variable and environ[name]), None)
        return tr("none", "limit") if value is None else f"{value:g} s", given or tr("default", "limit")

    plain, origin = setting("timeout")
    if config.timeout is None:
        plain = "300 s, 900 s, 1800 s"
        origin = joined(": ", (origin, tr("by size, below 1e7 elements, below 1e8, above")))
    return [
        Limit(
            tr("timeout= of a call, else NCCLGUARD_TIMEOUT"),
            tr('a guarded call (safe_*, the backend "ncclguard") outside of a phase'),
            plain,
            origin,
        ),
        *(
            Limit(
                f'phase("{phase}"), NCCLGUARD_TIMEOUT_{phase.upper()}',
                tr("the same inside `with phase({phase!r})`, where the call has no timeout=", phase=phase),
                *setting(f"timeout_{phase}"),
            )
            for phase in ("train", "eval", "small")
        ),
        Limit(
            "watch(timeout=)",
            tr("how long a collective that is only watched may stand still until it is reported"),
            tr("as a guarded call: {plain}", plain=plain),
            origin,
        ),
        Limit(
            "resilient_evaluate(timeout=)",
            tr("each collective inside an evaluation; barrier_timeout= (300 s): all ranks to arrive"),
            "1800 s",
            _ARGUMENT_ONLY,
        ),
        Limit("resilient_step(timeout=)", tr("the survivors' meeting after ranks were lost"), "300 s", _ARGUMENT_ONLY),
        Limit(
            "NCCLGUARD_STUCK_TIMEOUT",
            tr("a call ends before its own limit once a rank gave no sign of life for so long"),
            *setting("stuck_timeout"),
        ),
        _process_group(ladder.process_group),
        _heartbeat(ladder, versions, environ),
        Limit(
            tr("launcher"),
            tr("the whole job"),
            tr("unknown", "limit") if ladder.launcher.seconds is None else f"{ladder.launcher.seconds:g} s",
            tr("none that can be read here") if ladder.launcher.seconds is None else ladder.launcher.origin,
        ),
    ]


def _process_group(rung: Rung) -> Limit:
    """Describe the process group's limit: torch has defaults (torch/distributed/constants.py), and no variable."""
    governs = tr("a collective of torch that nobody guards: at its end torch ends the process (NCCL) or raises (gloo)")
    name = "init_process_group(timeout=)"
    if rung.origin.startswith("DEEPSPEED_TIMEOUT"):
        origin = tr("{origin}, where DeepSpeed makes the group", origin=rung.origin)
        return Limit(name, governs, f"{rung.seconds:g} s", origin)
    return Limit(
        name,
        governs,
        tr("600 s (NCCL), 1800 s (gloo)"),
        tr(
            "torch's defaults, no variable; give it {seconds:g} s, more than the longest guarded call",
            seconds=rung.seconds,
        ),
    )


def _heartbeat(ladder: Ladder, versions: Versions, environ: Mapping[str, str]) -> Limit:
    name, rung = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", ladder.heartbeat
    governs = tr("NCCL only: how long torch's watchdog may stand still before the process is ended")
    if rung.seconds is None or name in environ:
        now = tr("none", "limit") if rung.seconds is None else f"{rung.seconds:g} s"
        return Limit(name, governs, now, rung.origin)
    default = 480 if within(versions.torch, "2.5", None) else 600 if within(versions.torch, "2.3", None) else 120
    sets = tr("torch's default; setup_env() sets {seconds}", seconds=ladder.proposed_heartbeat)
    return Limit(name, governs, f"{default} s", sets)


def as_table(limits: list[Limit]) -> str:
    """Return the limits in the language of this process: a line with the value, and under it what it governs."""
    width = max(cell_len(str(said(limit.name))) for limit in limits)
    lines = []
    for limit in limits:
        name = str(said(limit.name))
        lines.append(f"{name}{' ' * (width - cell_len(name))}  {said(limit.now)}  [{said(limit.origin)}]")
        lines.append(f"{'':<{width}}  {said(limit.governs)}")
    return "\n".join(lines)
