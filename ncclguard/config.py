"""Settings: argument > `with phase(...)` > `NCCLGUARD_*` variable > default. docs/configuration.md lists them."""

from __future__ import annotations

import logging
import math
import numbers
import os
import re
import signal
import threading
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ncclguard.arguments import LONGEST, SHORTEST
from ncclguard.errors import GuardConfigError
from ncclguard.spelling import meant
from ncclguard_explain import language
from ncclguard_explain.language import Message, joined, told, tr

log = logging.getLogger("ncclguard")

PREFIX = "NCCLGUARD_"
#: Variables with this prefix that are not settings of the guard: those of drills, of ranks that
#: `ncclguard.faults` starts, of `ncclguard run`, and the one that `ncclguard_observe` reads.
OTHER_VARIABLES = frozenset(
    {
        "NCCLGUARD_ALLOW_DRILL",
        "NCCLGUARD_FAULT",
        "NCCLGUARD_JOB",
        "NCCLGUARD_JOINS",
        "NCCLGUARD_OBSERVE",
        "NCCLGUARD_PARENT_PATH",
        "NCCLGUARD_PLACE",
        "NCCLGUARD_PLACE_NUMBER",
        "NCCLGUARD_RUN_DIR",
    }
)
#: Operations from one exchange of statistics to the next where `statistics_every` is not set.
STATISTICS_EVERY = 100


_DURATION: Final = re.compile(
    r"\s*(\d+(?:\.\d+)?)\s*(|s|sec|secs|seconds?|m|mins?|minutes?|h|hours?)\s*", re.IGNORECASE
)
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}


def _read_duration(value: object) -> float:
    """Return what was meant by a text such as "5m" or "90 s", in seconds; 0 where that is none."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) * _UNITS[found[2][:1].lower()] if found else 0.0


def seconds(value: float | timedelta | None, what: str) -> float | None:
    """Return a time as seconds; None stays None.

    Raises TypeError for anything but a number or timedelta, ValueError for a time that is not positive and finite, is
    below 1 ms (torch would take it for no limit) or above 1e9 s. `what` names it in the message.

    >>> from datetime import timedelta
    >>> seconds(timedelta(minutes=5), "timeout")
    300.0
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (float, int, numbers.Real)):
        text = told(
            "{what} must be seconds or a timedelta, not {kind}: give for example {number:g}",
            what=what,
            kind=type(value).__name__,
            number=_read_duration(value) or 600,
        )
        raise TypeError(text)
    value = float(value)
    if not math.isfinite(value) or value <= 0:
        text = told(
            "{what} must be a positive, finite time, got {value:g} s: give for example 600",
            what=what,
            value=value,
        )
        raise ValueError(text)
    if value < SHORTEST:
        text = told(
            "{what} must be at least 1 ms, got {value:g} s: torch takes less for no time limit at all",
            what=what,
            value=value,
        )
        raise ValueError(text)
    if value > LONGEST:
        text = told(
            "{what} must be at most {most:g} s, got {value:g} s: give a limit that can be reached",
            what=what,
            most=LONGEST,
            value=value,
        )
        raise ValueError(text)
    return value


def checked_attempts(value: object) -> int:
    """Return how often a call may be tried.

    Raises TypeError for anything but a whole number, GuardConfigError, a ValueError, for one below 1.

    >>> checked_attempts(3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int):
        kind = type(value).__name__
        raise TypeError(told("max_attempts must be a whole number, not {kind}: give for example 3", kind=kind))
    if value < 1:
        text = told("max_attempts must be at least 1, got {value}: give 1 for no second try", value=value)
        raise GuardConfigError(text)
    return value


def is_time(given: object) -> bool:
    """Return whether this is a positive time, so that an error can say where a time given for another argument belongs.

    >>> is_time(30), is_time(0), is_time(True)
    (True, False, False)
    """
    if isinstance(given, timedelta):
        given = given.total_seconds()
    return isinstance(given, numbers.Real) and not isinstance(given, bool) and float(given) > 0


def _time(value: object) -> object:
    """Convert a setting's time from a number, a timedelta or the text of a variable."""
    value = _number(value)
    try:
        return seconds(cast("float | timedelta | None", value), tr("it", "setting"))
    except TypeError as error:  # pydantic reports ValueError only
        raise ValueError(str(error)) from None


def _number(value: object) -> object:
    """Convert the text of a variable to the number that it is; anything else stays."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(told("it is no number")) from None


def _count(value: object) -> object:
    """Convert a setting's whole number; accepts 5e7 and 50_000_000."""
    if isinstance(value, bool):
        raise ValueError(told("a whole number is needed, not a truth value"))  # noqa: TRY004 - pydantic takes only this
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _language(value: object) -> object:
    """Convert a setting's language; accepts zh_CN.UTF-8. No job ends because of the variable: it is warned of, once."""
    if not isinstance(value, str):
        return value
    if value == os.environ.get(language.VARIABLE):
        return language.of_variable(value)
    try:
        return language.parsed(value)
    except ValueError:
        raise ValueError(told("there is no such language")) from None


def _stack_signal(value: object) -> object:
    """Convert the name of a signal, of those for which `faulthandler.register` takes a handler."""
    if value is None:  # the text none of a variable
        return "none"
    if isinstance(value, str) and value not in ("auto", "none"):
        found = getattr(signal, value, None)
        if not isinstance(found, signal.Signals) or found in _NOT_HANDLED:
            raise ValueError(told("there is no signal of this name that a program can handle"))
    return value


#: The signals that no handler gets, and those of faults, which `faulthandler.register` refuses.
_NOT_HANDLED = frozenset(
    (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
)
Seconds = Annotated[float, BeforeValidator(_time)]
Count = Annotated[int, BeforeValidator(_count)]


def _setting(
    default: Any, unit: str, allowed: str, description: str, *, ge: float | None = None, le: float | None = None
) -> Any:
    """Make a field with the unit and the allowed values that its documentation and error message name."""
    return Field(default, ge=ge, le=le, description=description, json_schema_extra={"unit": unit, "allowed": allowed})


_TIME = tr("1 ms to 1e9 s")
_SWITCH = tr("true or false")


class GuardConfig(BaseSettings):
    """Every setting of the guard; frozen. Times in seconds or `timedelta`; what is not given is read from variables.

    docs/configuration.md lists the fields with variable, unit and default. Raises GuardConfigError naming the
    argument or variable, its value and what is allowed, and for limits that contradict each other.

    >>> GuardConfig(timeout_eval=3600).timeout_eval
    3600.0
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, env_parse_none_str="none", frozen=True, extra="forbid"
    )

    autostart: bool = _setting(
        True, "", _SWITCH, "start the monitor with init_process_group, not with the first guarded call"
    )
    timeout: Seconds | None = _setting(
        None,
        "s",
        tr("1 ms to 1e9 s, or none"),
        "budget of a call that has no argument and is in no phase; none: by size",
    )
    timeout_eval: Seconds = _setting(1800.0, "s", _TIME, 'budget inside phase("eval")')
    timeout_train: Seconds = _setting(600.0, "s", _TIME, 'budget inside phase("train")')
    timeout_small: Seconds = _setting(300.0, "s", _TIME, 'budget inside phase("small")')
    max_attempts: Count = _setting(
        3, "", tr("1 to 100"), "tries of one call, for faults of the transport, within its budget", ge=1, le=100
    )
    chunk_numel: Count | None = _setting(
        None, "elements", tr("1 or more, or none"), "length of a piece of a large tensor; none: by size", ge=1
    )
    atomic: bool | Literal["require"] = _setting(
        True,
        "",
        tr("true, false or require"),
        "keep a copy, so that a failed call leaves its input; require: refuse the call where memory for it is missing",
    )
    on_lost: Literal["fail", "shrink"] = _setting(
        "fail", "", tr("fail or shrink"), "when a rank is gone: fail, or let the others finish (needs atomic)"
    )
    on_failure: Literal["return", "raise"] = _setting(
        "return", "", tr("return or raise"), "give a failed outcome back, or raise its typed error"
    )
    stuck_timeout: Seconds | None = _setting(
        None,
        "s",
        tr("1 ms to 1e9 s and less than every timeout, or none"),
        "end a call before its deadline when a rank gave no sign of life for this long; none: at the deadline",
    )
    warn_after: Seconds = _setting(30.0, "s", _TIME, "log who is awaited, and where it is, after this time")
    rounds: bool = _setting(True, "", _SWITCH, "compare what the ranks call before data moves; equal on all ranks")
    numerics: Literal["off", "watch"] = _setting(
        "off",
        "",
        tr("off or watch"),
        "watch: look for a NaN or an infinity in what this rank brings to a guarded reduction, and tell whose was the first",
    )
    slow_ranks: Literal["watch", "off"] = _setting(
        "watch",
        "",
        tr("watch or off"),
        "watch: watch() takes samples on gloo, 25 a second, to name ranks that are slow without hanging; off: none",
    )
    closing_nbytes: Count = _setting(
        65536,
        "bytes",
        tr("0 to 1048576"),
        "results up to this size need no closing round; equal on all ranks",
        ge=0,
        le=1 << 20,
    )
    poll_idle: Seconds = _setting(
        0.5,
        "s",
        tr("1 ms to 1 s"),
        "period of the monitor while nothing is pending; bounds how late a rank learns of a failure",
        le=1,
    )
    poll_active: Seconds = _setting(
        0.05, "s", tr("1 ms to 0.2 s, at most poll_idle"), "period of the monitor while a call is pending", le=0.2
    )
    stack_signal: Annotated[str, BeforeValidator(_stack_signal)] = _setting(
        "auto",
        "",
        tr("auto, none, or a signal's name such as SIGUSR2"),
        "how ranks of one host get the stacks of one whose interpreter does not run; auto: a free real-time signal",
    )
    cross_memory: bool = _setting(
        True,
        "",
        _SWITCH,
        "ranks of one host read large parts of CPU tensors from each other's memory, where the kernel permits it",
    )
    build_slice: Seconds = _setting(
        5.0, "s", tr("1 s to 60 s"), "bound of one try to connect a communicator", ge=1, le=60
    )
    exit_linger: float = _setting(
        2.0,
        "s",
        tr("0 s to 60 s"),
        "how long the host of the store waits at exit for the others' goodbyes",
        ge=0,
        le=60,
    )

    statistics_every: Count | None = _setting(
        None,
        "operations",
        tr("0 to 1000000, or none; above 0 needs rounds"),
        "exchange statistics between the ranks with every so many-th operation of a group; none: every 100th where rounds is on; "
        "0: never; equal on all ranks",
        ge=0,
        le=1_000_000,
    )
    adjust: bool = _setting(
        False,
        "",
        tr("true or false; true needs the exchange of statistics"),
        "move the limits of phases and the length of pieces by what was measured; equal on all ranks",
    )
    adjust_timeout_min: Seconds = _setting(60.0, "s", _TIME, "adjust lowers no limit below this; equal on all ranks")
    adjust_timeout_max: Seconds = _setting(
        3600.0,
        "s",
        tr("1 ms to 1e9 s, at least adjust_timeout_min"),
        "adjust raises no limit above this; equal on all ranks",
    )
    adjust_chunk_min: Count = _setting(
        1_000_000,
        "elements",
        tr("1024 or more"),
        "adjust makes no piece shorter than this; equal on all ranks",
        ge=1024,
    )
    adjust_chunk_max: Count = _setting(
        100_000_000,
        "elements",
        tr("at least adjust_chunk_min"),
        "adjust makes no piece longer than this; equal on all ranks",
        ge=1024,
    )
    announce_sigterm: bool = _setting(
        True,
        "",
        _SWITCH,
        "tell the others before SIGTERM ends this process; a handler of the program's own is left alone",
    )
    report_dir: str | None = _setting(
        "ncclguard-incidents",
        "",
        tr("a folder, or none"),
        "where the JSON and the page of an incident go, relative to the working directory; none: no files",
    )
    report_panel: bool = _setting(True, "", _SWITCH, "show an incident on stderr, on the lowest live rank")
    language: Annotated[Literal["en", "zh"], BeforeValidator(_language)] = _setting(
        "en",
        "",
        tr("en or zh (also zh_CN, zh-CN)"),
        "what people read: incidents, their pages, errors; data stays English",
    )

    def __init__(self, **values: Any) -> None:
        _refuse_texts(values)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise GuardConfigError(_explain(error, values)) from None

    @model_validator(mode="after")
    def _limits_agree(self) -> GuardConfig:
        limits = {name: getattr(self, name) for name in ("timeout", "timeout_eval", "timeout_train", "timeout_small")}
        limit, name = min((value, name) for name, value in limits.items() if value is not None)
        if self.stuck_timeout is not None and self.stuck_timeout >= limit:
            text = told(
                "every timeout must exceed stuck_timeout, which could never end a call earlier otherwise: {name} is "
                "{limit:g} s, stuck_timeout {value:g} s; raise {name} or lower stuck_timeout",
                name=name,
                limit=limit,
                value=self.stuck_timeout,
            )
            raise ValueError(text)
        if self.poll_active > self.poll_idle:
            text = told(
                "poll_idle must be at least poll_active: it is {idle:g} s, poll_active {active:g} s; raise poll_idle or "
                "lower poll_active",
                idle=self.poll_idle,
                active=self.poll_active,
            )
            raise ValueError(text)
        if self.statistics_every and not self.rounds:
            text = told(
                "statistics_every={count} needs rounds=True: without rounds the ranks cannot know that all have the "
                "statistics; set statistics_every=0 or rounds=True",
                count=self.statistics_every,
            )
            raise ValueError(text)
        if self.adjust and not self.exchange_every:
            switched_off = "statistics_every=0" if self.statistics_every == 0 else "rounds=False"
            text = told(
                "adjust=True needs the exchange of statistics, which {setting} switches off: without it the ranks would "
                "decide differently; set adjust=False, or leave {name} at its default",
                setting=switched_off,
                name=switched_off.partition("=")[0],
            )
            raise ValueError(text)
        for low, high in (("adjust_timeout_min", "adjust_timeout_max"), ("adjust_chunk_min", "adjust_chunk_max")):
            if getattr(self, low) > getattr(self, high):
                text = told(
                    "{high} must be at least {low}: it is {most:g}, {low} {least:g}; raise {high} or lower {low}",
                    high=high,
                    low=low,
                    most=getattr(self, high),
                    least=getattr(self, low),
                )
                raise ValueError(text)
        if self.on_lost == "shrink" and self.atomic is False:
            text = told(
                'on_lost="shrink" needs atomic=True: the survivors start again from their inputs, which atomic=False '
                "does not keep; set one of the two"
            )
            raise ValueError(text)
        return self

    @property
    def exchange_every(self) -> int:
        """The number of operations from one exchange of statistics to the next; 0 for no exchange.

        Where `statistics_every` is not set, it follows `rounds`, without which there can be no exchange.
        """
        if self.statistics_every is not None:
            return self.statistics_every
        return STATISTICS_EVERY if self.rounds else 0


_lock = threading.Lock()
_current: GuardConfig | None = None


def current_config() -> GuardConfig:
    """Return the process-wide settings; the environment is read on the first call. Raises GuardConfigError."""
    global _current
    config = _current
    if config is None:
        with _lock:
            if _current is None:
                _warn_of_unknown_variables()
                _current = GuardConfig()
                language.choose(_current.language)
            config = _current
    return config


def configure(**changes: Any) -> GuardConfig:
    """Replace settings for this process and return them; raises GuardConfigError and changes nothing if they cannot be.

    Settings of the whole group (`rounds`, `closing_nbytes`, `statistics_every`, `adjust...`) must be the same on all
    ranks, and hold for guards made afterwards.

    >>> from ncclguard import configure
    >>> configure(warn_after=10).warn_after
    10.0
    """
    global _current
    config = GuardConfig(**{**current_config().model_dump(), **changes})
    with _lock:
        _current = config
    language.choose(config.language)
    return config


def reset_config() -> None:
    """Forget the settings of this process: the environment is read again on the next use."""
    global _current
    with _lock:
        _current = None
    language.choose(None)


def _explain(error: ValidationError, given: dict[str, Any]) -> str:
    """Turn the errors of one construction into text: for each field its source, its value and what is allowed."""
    sentences: dict[str, Message] = {}  # a field of several types has an error for each of them
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else ""
        if not name:
            sentences[name] = Message(item["msg"].removeprefix("Value error, "))
        elif name in GuardConfig.model_fields:
            variable = tr("the environment variable {name}", name=PREFIX + name.upper())
            text = tr(
                "{setting} is {value}; allowed: {allowed}",
                setting=name if name in given else variable,
                value=repr("none" if item["input"] is None and name not in given else item["input"]),
                allowed=allowed_values(name),
            )
            if item["type"] == "value_error":  # our own: pydantic's say in English what is allowed
                text = tr("{text} ({why})", text=text, why=item["ctx"]["error"].args[0])
            sentences.setdefault(name, text)
        else:
            there = tr("there are {some}", some=", ".join(GuardConfig.model_fields))
            hint = meant(name, GuardConfig.model_fields) or there
            sentences[name] = joined("; ", (tr("{name} is not a setting", name=name), hint))
    text = joined("; ", sentences.values())
    if text.endswith("?"):
        return told("{text} All settings are in docs/configuration.md.", text=text)
    return told("{text}. All settings are in docs/configuration.md.", text=text)


def _refuse_texts(given: dict[str, Any]) -> None:
    """Refuse text for a number: only a variable's text is read as one."""
    for name, value in given.items():
        field = GuardConfig.model_fields.get(name)
        if field is None or not isinstance(value, str):
            continue
        extra = field.json_schema_extra
        if (isinstance(extra, dict) and extra["unit"]) or type(field.default) in (int, float):
            text = tr("{setting} is {value}; allowed: {allowed}",
                      setting=name, value=repr(value), allowed=allowed_values(name))  # fmt: skip
            text = tr("{text} ({why})", text=text, why=tr("it is text, not a number"))
            raise GuardConfigError(told("{text}. All settings are in docs/configuration.md.", text=text))


def allowed_values(field: str) -> str:
    """Return the values that a setting may have, in words."""
    extra = GuardConfig.model_fields[field].json_schema_extra
    allowed = extra["allowed"] if isinstance(extra, dict) else ""
    return allowed if isinstance(allowed, Message) else str(allowed)


def _warn_of_unknown_variables() -> None:
    known = {PREFIX + name.upper() for name in GuardConfig.model_fields} | OTHER_VARIABLES
    for name in sorted(os.environ):
        # NCCL_GUARD_TIMEOUT was meant as well; what begins with an underline is between a job's own processes.
        ours = name[0] != "_" and name.upper().replace("_", "").startswith(PREFIX.rstrip("_"))
        if ours and name.upper() not in known:
            hint = meant(name.upper(), known) or tr("see docs/configuration.md for those that have")
            text = told("the environment variable {name} has no effect: {details}", name=name, details=hint)
            # The ranks of a host have their variables of one launcher, and one of them says it.
            level = logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.INFO
            log.log(level, "ncclguard: %s", text)
