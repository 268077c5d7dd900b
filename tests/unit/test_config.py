"""Settings: which source counts, what is refused and in which words, phases, times."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import ValidationError

import ncclguard
from ncclguard.config import OTHER_VARIABLES, PREFIX, GuardConfig, configure, current_config, reset_config, seconds
from ncclguard.engine import runtime
from ncclguard.errors import GuardConfigError
from ncclguard.phases import KEPT, current_phase, phase, phases_of, resolve_timeout


class TestSources:
    def test_defaults(self) -> None:
        config = current_config()
        assert config.timeout is None
        assert (config.timeout_eval, config.timeout_train, config.timeout_small) == (1800, 600, 300)
        assert (config.max_attempts, config.atomic, config.on_lost, config.on_failure) == (3, True, "fail", "return")

    @pytest.mark.parametrize(
        ("field", "text", "value"),
        [
            ("timeout", "90", 90.0),
            ("timeout", "1.5e3", 1500.0),
            ("timeout", "none", None),
            ("timeout", "", None),
            ("chunk_numel", "5e7", 50_000_000),
            ("chunk_numel", "50_000_000", 50_000_000),
            ("max_attempts", "5", 5),
            ("atomic", "require", "require"),
            ("atomic", "0", False),
            ("on_lost", "shrink", "shrink"),
            ("rounds", "off", False),
            ("stuck_timeout", "60", 60.0),
        ],
    )
    def test_a_variable_sets_its_field(
        self, monkeypatch: pytest.MonkeyPatch, field: str, text: str, value: object
    ) -> None:
        monkeypatch.setenv(PREFIX + field.upper(), text)
        assert getattr(current_config(), field) == value

    def test_the_environment_is_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCLGUARD_WARN_AFTER", "7")
        assert current_config().warn_after == 7
        monkeypatch.setenv("NCCLGUARD_WARN_AFTER", "8")
        assert current_config().warn_after == 7
        assert configure(max_attempts=2).warn_after == 7
        reset_config()
        assert current_config().warn_after == 8

    def test_configure_counts_before_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCLGUARD_TIMEOUT", "7")
        assert configure(timeout=timedelta(minutes=2)).timeout == 120
        assert current_config().timeout == 120

    def test_a_refused_change_changes_nothing(self) -> None:
        configure(timeout=77)
        with pytest.raises(GuardConfigError):
            configure(timeout=88, max_attempts=0)
        assert current_config().timeout == 77

    def test_settings_cannot_be_assigned(self) -> None:
        with pytest.raises(ValidationError):
            current_config().timeout = 3


class TestRefusals:
    """Each names whose value it is, the value, and what is allowed."""

    @pytest.mark.parametrize(
        ("variable", "text", "allowed"),
        [
            ("NCCLGUARD_TIMEOUT", "ten", "1 ms to 1e9 s, or none"),
            ("NCCLGUARD_TIMEOUT", "-1", "1 ms to 1e9 s, or none"),
            ("NCCLGUARD_TIMEOUT_EVAL", "nan", "1 ms to 1e9 s"),
            ("NCCLGUARD_TIMEOUT_TRAIN", "none", "1 ms to 1e9 s"),
            ("NCCLGUARD_ATOMIC", "perhaps", "true, false or require"),
            ("NCCLGUARD_ON_LOST", "shrnk", "fail or shrink"),
            ("NCCLGUARD_ON_FAILURE", "ignore", "return or raise"),
            ("NCCLGUARD_MAX_ATTEMPTS", "0", "1 to 100"),
            ("NCCLGUARD_MAX_ATTEMPTS", "2.5", "1 to 100"),
            ("NCCLGUARD_CHUNK_NUMEL", "0", "1 or more, or none"),
            ("NCCLGUARD_ROUNDS", "maybe", "true or false"),
            ("NCCLGUARD_POLL_IDLE", "2", "1 ms to 1 s"),
            ("NCCLGUARD_EXIT_LINGER", "-1", "0 s to 60 s"),
            ("NCCLGUARD_STACK_SIGNAL", "NOSUCH", "auto, none, or a signal's name"),
            ("NCCLGUARD_STACK_SIGNAL", "SIGKILL", "auto, none, or a signal's name"),
            ("NCCLGUARD_STACK_SIGNAL", "SIGSEGV", "auto, none, or a signal's name"),
        ],
    )
    def test_a_wrong_variable(self, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, allowed: str) -> None:
        monkeypatch.setenv(variable, text)
        with pytest.raises(GuardConfigError) as caught:
            current_config()
        message = str(caught.value)
        assert f"variable {variable} is" in message
        assert text in message
        assert f"allowed: {allowed}" in message

    @pytest.mark.parametrize("value", [True, "soon", 0, -3, math.nan, math.inf, timedelta(0), 0.0005, 1e12, [600]])
    def test_a_wrong_time(self, value: object) -> None:
        with pytest.raises(GuardConfigError, match=r"^timeout is .*; allowed: 1 ms to 1e9 s, or none \("):
            configure(timeout=value)

    @pytest.mark.parametrize("name", ["timeout", "warn_after", "max_attempts", "chunk_numel", "exit_linger"])
    def test_text_is_no_number_but_in_a_variable(self, name: str) -> None:
        with pytest.raises(GuardConfigError, match=rf"^{name} is '1'; allowed: .* \(it is text, not a number\)"):
            configure(**{name: "1"})

    @pytest.mark.parametrize("name", ["auto", "none", "SIGUSR2", "SIGRTMIN"])
    def test_the_name_of_a_signal(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv("NCCLGUARD_STACK_SIGNAL", name)
        assert current_config().stack_signal == configure(stack_signal=name).stack_signal == name

    def test_nothing_of_it_is_in_another_language(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """pydantic and Python say in English what is wrong."""
        monkeypatch.setenv("NCCLGUARD_LANGUAGE", "zh")
        for name, value in (("timeout", "abc"), ("on_failure", "ignore"), ("max_attempts", 0), ("language", "klingon")):
            with pytest.raises(GuardConfigError) as caught:
                GuardConfig(**{name: value})
            words = re.sub(r"`[^`]*`|'[^']*'|[\w./]*docs/[\w./]*", "", str(caught.value))
            assert not re.search(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", words), words

    def test_one_that_is_met_when_the_process_group_begins_is_told_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("NCCLGUARD_TIMEOUT", "ten")
        runtime._after_init()
        (record,) = caplog.records
        assert record.exc_info is None and "NCCLGUARD_TIMEOUT is 'ten'" in record.getMessage()

    @pytest.mark.parametrize("value", [True, 2.5, "many", None])
    def test_a_wrong_count(self, value: object) -> None:
        with pytest.raises(GuardConfigError, match="^max_attempts is .*; allowed: 1 to 100"):
            configure(max_attempts=value)

    def test_below_a_millisecond_says_why(self) -> None:
        with pytest.raises(GuardConfigError, match="torch takes less for no time limit"):
            GuardConfig(timeout=0.0001)

    def test_an_unknown_setting_names_the_closest(self) -> None:
        with pytest.raises(GuardConfigError, match="timeot is not a setting; did you mean timeout"):
            configure(timeot=3)
        with pytest.raises(GuardConfigError, match="there are .*max_attempts"):
            configure(zzz=3)

    def test_several_at_once_are_all_named(self) -> None:
        with pytest.raises(GuardConfigError, match=r"(?s)timeout is -1.*max_attempts is 0"):
            GuardConfig(timeout=-1, max_attempts=0)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"stuck_timeout": 300},
                "every timeout must exceed stuck_timeout.*timeout_small is 300 s, stuck_timeout 300 s",
            ),
            ({"stuck_timeout": 60, "timeout": 30}, "timeout is 30 s, stuck_timeout 60 s"),
            ({"poll_idle": 0.01}, "poll_idle must be at least poll_active"),
            ({"on_lost": "shrink", "atomic": False}, 'on_lost="shrink" needs atomic=True'),
        ],
    )
    def test_contradictory_limits_say_which_must_exceed_which(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(GuardConfigError, match=message):
            configure(**changes)

    def test_the_error_is_a_value_error(self) -> None:
        with pytest.raises(ValueError, match="max_attempts"):
            configure(max_attempts=-1)


class TestUnknownVariables:
    @pytest.mark.parametrize("name", ["NCCLGUARD_TIMOUT", "NCCL_GUARD_TIMEOUT", "NCCLGUARDTIMEOUT"])
    def test_a_misspelt_variable_is_logged_with_the_closest(
        self, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(name, "3")
        assert current_config().timeout is None
        assert f"{name} has no effect: did you mean NCCLGUARD_TIMEOUT?" in caplog.text

    def test_one_rank_of_a_host_warns_of_it(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("NCCLGUARD_TIMOUT", "3")
        for rank in ("0", "1"):
            monkeypatch.setenv("LOCAL_RANK", rank)
            reset_config()
            assert current_config().timeout is None
        assert [record.levelname for record in caplog.records if "has no effect" in record.message] == ["WARNING"]

    def test_variables_of_other_parts_are_known(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in [*OTHER_VARIABLES, "_NCCLGUARD_REPORT_DIR"]:
            monkeypatch.setenv(name, "1")
        current_config()
        assert caplog.text == ""

    def test_every_variable_in_the_source_is_known(self) -> None:
        """A variable that one part reads must not be reported as meaningless by this one."""
        package = Path(ncclguard.__file__).parent
        used = {
            name
            for path in package.rglob("*.py")
            for name in re.findall(r"[\"'](NCCLGUARD_[A-Z_]*[A-Z])[\"']", path.read_text())
        }
        known = {PREFIX + name.upper() for name in GuardConfig.model_fields} | OTHER_VARIABLES
        assert used <= known


class TestPhases:
    def test_phases_nest_and_the_innermost_counts(self) -> None:
        seen = [current_phase()]
        with phase("eval"):
            seen.append(current_phase())
            with phase("small"):
                seen.append(current_phase())
            seen.append(current_phase())
        seen.append(current_phase())
        assert seen == [None, "eval", "small", "eval", None]

    def test_an_exception_leaves_the_phase(self) -> None:
        with pytest.raises(KeyError), phase("train"):
            raise KeyError
        assert current_phase() is None

    @pytest.mark.parametrize("name", ["evaluation", "", None, 3])
    def test_an_unknown_phase_lists_the_names(self, name: Any) -> None:
        with pytest.raises(GuardConfigError, match="'train', 'eval', 'small'"):
            phase(name)

    def test_one_object_serves_again_and_within_itself(self) -> None:
        shared = phase("eval")
        with shared, shared:
            assert current_phase() == "eval"
        assert current_phase() is None
        with shared:
            assert current_phase() == "eval"

    def test_as_a_decorator(self) -> None:
        @phase("eval")
        def evaluate(depth: int) -> list[str | None]:
            """Docstring."""
            return [current_phase(), *(evaluate(depth - 1) if depth else [])]

        assert evaluate(2) == ["eval"] * 3
        assert evaluate.__doc__ == "Docstring."
        assert current_phase() is None

    def test_a_thread_started_inside_has_none_and_shares_no_state(self) -> None:
        """Two threads are inside the same object, and leave in the order they entered."""
        shared, entered, left = phase("eval"), threading.Event(), threading.Event()
        seen: list[str | None] = []

        def other() -> None:
            seen.append(current_phase())
            with shared:
                entered.set()
                left.wait(30)
                seen.append(current_phase())

        with shared:
            thread = threading.Thread(target=other)
            thread.start()
            assert entered.wait(30)
        assert current_phase() is None
        left.set()
        thread.join(30)
        assert seen == [None, "eval"]

    def test_tasks_do_not_see_each_others_phase(self) -> None:
        @phase("small")
        async def small() -> str | None:
            await asyncio.sleep(0)
            return current_phase()

        async def none() -> str | None:
            await asyncio.sleep(0)
            return current_phase()

        async def both() -> list[str | None]:
            return list(await asyncio.gather(small(), none(), small()))

        assert asyncio.run(both()) == ["small", None, "small"]

    def test_other_threads_see_what_a_thread_was_in_when(self) -> None:
        """And of a thread that is not Python's what the main thread was in; of an earlier time than is kept the oldest."""
        times = [time.time_ns()]
        with phase("eval"):
            times.append(time.time_ns())
            with phase("small"):
                times.append(time.time_ns())
        times.append(time.time_ns())
        main = threading.get_ident()
        seen: list[tuple[str, ...]] = []

        def other() -> None:
            seen.extend(phases_of(thread, at) for thread in (main, 1) for at in times)
            seen.append(phases_of(threading.get_ident(), times[1]))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        assert seen == [(), ("eval",), ("eval", "small"), ()] * 2 + [()]
        for _ in range(KEPT):
            with phase("train"):
                pass
        assert phases_of(main, times[1]) == ("train",)

    def test_a_generator_cannot_be_decorated(self) -> None:
        def rows() -> Iterator[int]:
            yield 1

        async def more_rows() -> AsyncIterator[int]:
            yield 1

        with pytest.raises(TypeError, match="use `with phase"):
            phase("eval")(rows)
        with pytest.raises(TypeError, match="use `with phase"):
            phase("eval")(more_rows)


class TestTimes:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, None),
            (5, 5.0),
            (0.001, 0.001),
            (timedelta(minutes=5), 300.0),
            (numpy.float32(2.5), 2.5),
            (numpy.int64(3), 3.0),
        ],
    )
    def test_accepted(self, value: Any, expected: float | None) -> None:
        assert seconds(value, "timeout") == expected

    @pytest.mark.parametrize(
        ("text", "number"), [("5m", 300), ("90 s", 90), ("1.5h", 5400), ("600", 600), ("soon", 600), ("0s", 600)]
    )
    def test_a_time_as_text_is_refused_with_its_seconds(self, text: str, number: int) -> None:
        with pytest.raises(
            TypeError, match=f"^timeout must be seconds or a timedelta, not str: give for example {number}$"
        ):
            seconds(text, "timeout")  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", [True, "5", [5], Decimal(5), 5j, torch.tensor(5.0)])
    def test_wrong_types(self, value: Any) -> None:
        with pytest.raises(TypeError, match="^limit must be seconds or a timedelta, not "):
            seconds(value, "limit")

    @pytest.mark.parametrize(
        "value", [0, -0.0, -1, math.nan, math.inf, -math.inf, 0.0009, 1.1e9, timedelta(0), timedelta(days=-1)]
    )
    def test_wrong_values(self, value: Any) -> None:
        with pytest.raises(ValueError, match="^limit must be "):
            seconds(value, "limit")

    @given(st.floats(min_value=0.001, max_value=1e9))
    def test_every_time_in_range_is_kept(self, value: float) -> None:
        assert seconds(value, "timeout") == value

    def test_precedence_of_a_calls_limit(self) -> None:
        """argument > phase > configured > size."""
        assert resolve_timeout(None, 10) == 300
        assert resolve_timeout(None, 50_000_000) == 900
        assert resolve_timeout(None, 467_019_003) == 1800
        configure(timeout=42)
        assert resolve_timeout(None, 467_019_003) == 42
        with phase("eval"):
            assert resolve_timeout(None, 10) == 1800
            assert resolve_timeout(timedelta(seconds=7), 10) == 7
            with phase("train"):
                assert resolve_timeout(None, 10) == 600
        with pytest.raises(ValueError, match="timeout must be"):
            resolve_timeout(0, 10)


class TestInChinese:
    """What is wrong with a setting, in the language of `NCCLGUARD_LANGUAGE`."""

    SENTENCE = r"\b[a-z]{2,} [a-z]{2,}\b"

    @pytest.fixture(autouse=True)
    def _chinese(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCLGUARD_LANGUAGE", "zh")

    @pytest.mark.parametrize(
        "changes",
        [
            {"timeout": -1},
            {"timeout": True},
            {"max_attempts": True},
            {"timeot": 3},
            {"nothing_alike_at_all": 3},
            {"stuck_timeout": 900},
            {"poll_active": 0.2, "poll_idle": 0.1},
            {"rounds": False, "statistics_every": 5},
            {"adjust": True, "statistics_every": 0},
            {"adjust_chunk_min": 5000, "adjust_chunk_max": 2000},
            {"on_lost": "shrink", "atomic": False},
            {"language": "xx", "warn_after": 1e12},
        ],
    )
    def test_no_sentence_of_an_error_stays_english(self, changes: dict[str, Any]) -> None:
        with pytest.raises(GuardConfigError) as caught:
            GuardConfig(**changes)
        text = re.sub(r"（[^（）]*language[^（）]*）", "", str(caught.value))
        assert re.search(r"[\u4e00-\u9fff]", text)
        assert not re.search(self.SENTENCE, text), text

    def test_a_wrong_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NCCLGUARD_TIMEOUT", "0")
        with pytest.raises(GuardConfigError) as caught:
            current_config()
        assert str(caught.value) == (
            "环境变量 NCCLGUARD_TIMEOUT 是 '0'；允许的值：1 ms 到 1e9 s，或 none（它必须是有限的正数，现在是 0 s："
            "例如写 600）。所有设置见 docs/configuration.md。"
        )


def test_a_question_is_followed_by_no_full_stop() -> None:
    with pytest.raises(GuardConfigError, match=r"did you mean timeout\? All settings are in docs/configuration\.md\.$"):
        GuardConfig(timeot=3)
