"""What lies in operations/: rules and dashboard name metrics that exist, alerts fire when they should, schemas are the models'."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.environment.doctor import command as doctor
from ncclguard.metrics.records import ChannelStatus, OpenOperation, SlowRanks, Snapshot, StragglerRow, StragglerTable
from ncclguard.metrics.registry import Registry
from ncclguard.metrics.sinks import PrometheusSink
from ncclguard_explain import command as explain
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "operations"
RULES = OPERATIONS / "prometheus" / "rules.yml"
TESTS = OPERATIONS / "prometheus" / "rules_test.yml"
DASHBOARD = OPERATIONS / "grafana" / "ncclguard.json"
HOOK = OPERATIONS / "hooks" / "run-and-explain"
#: Labels that a sample has from Prometheus: the name of the scrape, and the address.
FROM_PROMETHEUS = {"job", "instance"}


def snapshot(*, rank: int = 0, count: int = 100, failed: int = 1, hang: bool = False) -> Snapshot:
    """One of a rank that has seen everything that the sink has a metric for."""
    registry = Registry()
    for _ in range(count):
        registry.success("0:cpu", "all_reduce", "train", 4096, 0.02, 0.015, 1)
    for _ in range(failed):
        registry.failure("0:cpu", "all_reduce", "train", 4096, 60.0, 1, "late", (1,))
    row = StragglerRow(rank=1, host="node2", pid=7, last=9, behind=0.75, behind_longest=0.9, held_up=2.0, waited=0.001)
    call = OpenOperation(group="0:cpu", op_id="0:cpu/11", text="barrier()", age=31.0, limit=300.0, late=True)
    return Snapshot(
        time=1700000000.0, job="job1", rank=rank, host="node1", pid=42, world_size=2, uptime=60.0, hang=hang,
        open=(call,) if hang else (), series=registry.snapshot(),
        stragglers=(StragglerTable(group="0:cpu", through="0:cpu/10", age=2.0, operations=10, rows=(row,)),),
        slow=SlowRanks(
            ranks=(1,), hosts=("node2",), kind="data loading", place="train.py:9 in batch", awaited_at="", factor=1.2,
            lost=0.15, sure=True,
        ),
        channels=(ChannelStatus(channel="weights", end="trainer", left_out={"engine 2": 1}),),
    )  # fmt: skip


@pytest.fixture
def exposed() -> dict[str, set[str]]:
    """Name of each sample that the sink really exposes -> its labels."""
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    registry = client.CollectorRegistry()
    sink = PrometheusSink(registry=registry)
    sink.write(snapshot())
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    sink.close()
    return found


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard that show something."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> list[str]:
    """The expressions of the dashboard, and of what its menus offer."""
    menus = [one["query"]["query"] for one in json.loads(DASHBOARD.read_text())["templating"]["list"][1:]]
    return [target["expr"] for panel in panels() for target in panel["targets"]] + menus


def metrics(text: str) -> set[str]:
    """The names of ncclguard's samples in an expression."""
    return set(re.findall(r"\bncclguard_[a-z_]+", text))


def test_rules_and_dashboard_name_only_metrics_that_the_sink_exposes(exposed: dict[str, set[str]]) -> None:
    named = {
        "rules": metrics(re.sub(r"rules_test\.yml|#.*", "", RULES.read_text())),
        "tests of the rules": metrics(TESTS.read_text()),
        "dashboard": metrics(" ".join(queries())),
    }
    for where, names in named.items():
        assert names, where
        assert names <= set(exposed), where


def test_the_dashboard_shows_every_family_of_the_sink(exposed: dict[str, set[str]]) -> None:
    def family(name: str) -> str:
        return re.sub(r"_(bucket|sum|count|total)$", "", name)

    assert {family(name) for name in exposed} == {family(name) for name in metrics(" ".join(queries()))}


def test_rules_and_dashboard_use_only_labels_that_these_metrics_have(exposed: dict[str, set[str]]) -> None:
    alerts = re.findall(r"expr: (.*?)\n\s+(?:for|labels):", RULES.read_text(), re.DOTALL)
    assert len(alerts) == RULES.read_text().count("- alert:")
    for expression in [*alerts, *queries()]:
        known = FROM_PROMETHEUS.union(*(exposed[name] for name in metrics(expression)))
        used = {
            name.strip() for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for name in names.split(",")
        }
        used |= set(re.findall(r'(\w+)=~"', expression))
        assert used <= known, expression


def test_panels_do_not_cover_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


# ---------------------------------------------------------------------- Prometheus itself


def tool(name: str) -> str:
    """A program of Prometheus; the test is skipped where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here: Debian and Ubuntu have it in the package prometheus")
    return found


@pytest.mark.processes
@pytest.mark.parametrize("arguments", ["check rules rules.yml", "check config scrape.yml", "test rules rules_test.yml"])
def test_promtool_accepts_the_rules_and_each_alert_fires_when_it_should(arguments: str) -> None:
    done = subprocess.run(
        [tool("promtool"), *arguments.split()],
        cwd=RULES.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
def test_promtools_tests_fail_for_a_rule_that_misses_the_first_failure(tmp_path: Path) -> None:
    """`increase` alone sees no counter that appears with its first count."""
    promtool = tool("promtool")
    (tmp_path / "rules.yml").write_text(re.sub(r"\n +or max by \(job, cause\).*", "", RULES.read_text()))
    shutil.copy(TESTS, tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", TESTS.name], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "NcclguardOperationFailed" in done.stdout + done.stderr


class Prometheus:
    """A real one, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, what: str, **values: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{what}?{urllib.parse.urlencode(values)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def until(self, what: str, found: Any, **values: str) -> Any:
        """Ask until `found` of the answer is true; the test fails after a minute."""
        until = time.monotonic() + 60
        while True:
            try:
                answer = self.ask(what, **values)
                if found(answer):
                    return answer
            except OSError:
                answer = "no answer"
            assert time.monotonic() < until, answer
            time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, targets: Sequence[int]) -> Iterator[Prometheus]:
    """One that asks these ports every second, with the rules of this repository and no waiting before an alert."""
    rules = re.sub(r"for: \w+", "for: 0s", RULES.read_text())
    (folder / "rules.yml").write_text(rules)
    scrape = (OPERATIONS / "prometheus" / "scrape.yml").read_text()
    scrape = re.sub(r"targets: .*", f"targets: {json.dumps([f'127.0.0.1:{port}' for port in targets])}", scrape)
    (folder / "scrape.yml").write_text(scrape.replace("15s", "1s"))
    port = free_port()
    command = [tool("prometheus"), "--config.file=scrape.yml", "--storage.tsdb.path=data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.processes
def test_a_real_prometheus_scrapes_two_ranks_answers_every_panel_and_raises_the_alerts(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    tool("prometheus")
    sinks = [PrometheusSink(0, address="127.0.0.1", registry=client.CollectorRegistry()) for _ in range(2)]
    try:
        for rank, sink in enumerate(sinks):
            sink.write(snapshot(rank=rank))
        with prometheus(tmp_path, [sink.port or 0 for sink in sinks]) as server:
            server.until("query", lambda data: len(data["result"]) == 2, query="ncclguard_hang")
            for rank, sink in enumerate(sinks):  # rank 1 is awaited, and rank 0 has counted more
                sink.write(snapshot(rank=rank, count=200, failed=3, hang=rank == 0))
            hanging = server.until("query", lambda data: data["result"], query="ncclguard_hang == 1")
            assert [one["metric"]["rank"] for one in hanging["result"]] == ["0"]
            values = {"$job": ".*", "$group": ".*", "$phase": ".*", "$__rate_interval": "30s"}
            empty = []
            for panel in panels():
                for target in panel["targets"]:
                    query = target["expr"]
                    for name, value in values.items():
                        query = query.replace(name, value)
                    if not server.until("query", lambda data: True, query=query)["result"]:
                        empty.append(query)
            assert not empty
            expected = {"NcclguardHang", "NcclguardOperationFailed", "NcclguardSameRankAgain", "NcclguardStraggler"}
            told = server.until(
                "alerts", lambda data: expected <= {one["labels"]["alertname"] for one in data["alerts"]}
            )
            hang = next(one for one in told["alerts"] if one["labels"]["alertname"] == "NcclguardHang")
            assert "are awaited: 1 ." in hang["annotations"]["description"]
            assert server.ask("rules", type="alert")["groups"][0]["rules"]
            sinks[1].close()
            lost = server.until(
                "alerts",
                lambda data: any(one["labels"]["alertname"] == "NcclguardRankNotScraped" for one in data["alerts"]),
            )
            assert f"127.0.0.1:{sinks[1].port}" in str(lost)
    finally:
        sinks[0].close()


# ---------------------------------------------------------------------- schemas


@pytest.fixture(scope="module")
def schema() -> types.ModuleType:
    """scripts/schema.py."""
    spec = importlib.util.spec_from_file_location("ncclguard_scripts_schema", ROOT / "scripts" / "schema.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_schemas_in_the_repository_are_those_of_the_models(schema: types.ModuleType) -> None:
    assert {file.name: file.read_text() for file in (OPERATIONS / "schema").iterdir()} == schema.schemas()


def validate(name: str, text: str) -> dict[str, Any]:
    """The document, which is what the schema says; one with another version, or without it, is refused."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = json.loads((OPERATIONS / "schema" / name).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found: dict[str, Any] = json.loads(text)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(found)
    assert not validator.is_valid({**found, "schema_version": 99})
    assert not validator.is_valid({key: value for key, value in found.items() if key != "schema_version"})
    return found


def one_comes_late() -> None:
    """A rank of a job in which the second one comes after the limit."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()  # the ranks start apart
    if dist.get_rank() == 1:
        time.sleep(8.0)
    assert not ng.safe_all_reduce(torch.ones(10), timeout=3.0)
    dist.destroy_process_group()


@pytest.mark.processes
def test_a_real_incident_and_its_report_are_what_their_schemas_say(tmp_path: Path) -> None:
    result = faults.run_ranks(one_comes_late, 2, env={"NCCLGUARD_REPORT_DIR": str(tmp_path)}, timeout=100.0)
    assert result.ok, str(result)
    (file,) = tmp_path.glob("incident-*.json")
    incident = validate("incident-report-1.json", file.read_text())["incident"]
    assert incident["culprits"] == [1]
    validate("incident-1.json", json.dumps(incident))


def test_a_real_explanation_is_what_its_schema_says(tmp_path: Path) -> None:
    found = []
    for case in ("legacy-late", "nccl2-mismatch-shape", "legacy-exit-torchrun"):
        out = tmp_path / f"{case}.json"
        assert explain.main([str(ROOT / "tests" / "unguarded_logs" / case), "--json", str(out)]) == 0
        found.append(validate("explain-1.json", out.read_text())["incident"])
    assert all(found)


@pytest.mark.processes
def test_a_real_examination_by_the_doctor_is_what_its_schema_says(tmp_path: Path) -> None:
    doctor.main(["--json", str(tmp_path / "doctor.json")])
    checks = validate("doctor-1.json", (tmp_path / "doctor.json").read_text())["checks"]
    assert {"interface", "gpus", "connections"} <= {check["name"] for check in checks}


# ---------------------------------------------------------------------- hooks


def on_path(folder: Path) -> dict[str, str]:
    """An environment in which `ncclguard` is this one."""
    folder.mkdir(exist_ok=True)
    command = folder / "ncclguard"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ncclguard "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


FAILS = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    raise KeyError("label")
dist.barrier()
"""


@pytest.mark.processes
def test_a_job_that_fails_under_torchrun_explains_itself_and_keeps_its_exit_code(tmp_path: Path) -> None:
    """With the variable set the exit code is the decision: 12, fix-code, because a rank raised."""
    (tmp_path / "train.py").write_text(FAILS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--log-dir", "logs", "-r", "3", "train.py"]
    environment = {**on_path(tmp_path / "bin"), "TERMINATION_LOG": str(tmp_path / "termination-log")}
    (tmp_path / "termination-log").touch()
    environment["NCCLGUARD_EXIT_WITH_DECISION"] = "1"
    done = subprocess.run(
        [HOOK, "logs", *launch], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 12, done.stdout + done.stderr
    report = validate("explain-1.json", (tmp_path / "logs.explain.json").read_text())
    assert report["decision"] == "fix-code" and report["culprits"] == [1]
    assert "rank 1" in (tmp_path / "termination-log").read_text()
    assert (tmp_path / "logs.explain.html").stat().st_size > 1000
    assert "KeyError" in (tmp_path / "logs" / "output.log").read_text() + done.stdout


@pytest.mark.processes
@pytest.mark.parametrize(("command", "code"), [("exit 0", 0), ("echo oops >&2; exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_of_the_command_counts_whatever_explains_it(tmp_path: Path, command: str, code: int) -> None:
    """Here `explain` itself is broken."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ncclguard").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "bin" / "ncclguard").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [HOOK, tmp_path / "logs", "sh", "-c", command], env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert (b"oops" in done.stdout) == ("oops" in command)


@pytest.mark.processes
def test_sigterm_reaches_the_command(tmp_path: Path) -> None:
    """Also when it comes as soon as the command runs, which the hook may not know by then."""
    program = "trap 'echo ended in order; exit 3' TERM; kill -TERM $PPID; while :; do sleep 0.1; done"
    for number in range(5):
        command = [HOOK, tmp_path / f"logs{number}", "sh", "-c", program]
        process = subprocess.Popen(
            command, env=on_path(tmp_path / "bin"), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        assert "ended in order" in output
        assert process.returncode == 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("doctor_says", "code"),
    [
        ({"name": "gpus", "status": "error", "detail": "nvidia-smi hangs"}, 1),
        ({"name": "master", "status": "error", "detail": "MASTER_ADDR does not resolve"}, 0),
        ({"name": "gpus", "status": "warning", "detail": "ECC errors were corrected"}, 0),
        (None, 0),
    ],
    ids=["a broken GPU", "what is the job's own", "a warning", "a doctor that fails"],
)
def test_the_prolog_drains_a_host_for_its_hardware_only(
    tmp_path: Path, doctor_says: dict[str, str] | None, code: int
) -> None:
    report = "" if doctor_says is None else json.dumps({"schema_version": 1, "checks": [doctor_says]})
    failed = doctor_says is None or doctor_says["status"] == "error"
    command = tmp_path / "ncclguard"
    command.write_text(f"#!/bin/sh\ncat > \"$3\" <<'END'\n{report}\nEND\nexit {2 if failed else 0}\n")
    command.chmod(0o755)
    environment = {"NCCLGUARD_BIN": str(tmp_path), "NCCLGUARD_PROLOG_LOG": str(tmp_path / "doctor.json")}
    done = subprocess.run(
        ["/bin/bash", OPERATIONS / "slurm" / "prolog.sh"], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert ("nvidia-smi hangs" in done.stdout) == (code == 1)
