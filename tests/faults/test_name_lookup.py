"""torch's TCPStore asks for the name of whoever connects and serves nobody until that is answered; hosts made here need not ask."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from ncclguard import faults
from ncclguard.faults.launcher import environment_of

_REASON = faults.namespaces_available()
LIMIT = 60.0


class NameServer:
    """On this host; knows no name, and says so only while `answering` is set."""

    def __init__(self) -> None:
        self.questions: list[bytes] = []
        self.answering = threading.Event()
        self.answering.set()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            question, peer = self._socket.recvfrom(4096)
            self.questions.append(question)
            self.answering.wait()
            no_such_name = question[:2] + b"\x81\x83" + question[4:6] + b"\0" * 6 + question[12:]
            self._socket.sendto(no_such_name, peer)


def put_over(path: Path, own: Path, text: str) -> None:
    """Another content for a file of the system, from a file of its own, for this process alone."""
    own.write_text(text)
    subprocess.run(["mount", "--bind", own, path], check=True)


def use(store: dist.TCPStore, served: threading.Event) -> None:
    store.add("calls", 1)
    served.set()


def serve_while_somebody_connects(address: str, folder: str) -> None:
    del os.environ["RES_OPTIONS"]
    names = NameServer()
    put_over(Path("/etc/resolv.conf"), Path(folder, "resolv.conf"), "nameserver 127.0.0.1\n")
    for hosts in ("as made", "without names"):
        if hosts == "without names":
            put_over(Path("/etc/hosts"), Path(folder, "hosts"), "127.0.0.1 localhost\n")
        names.questions.clear()
        store = dist.TCPStore(address, 0, 1, is_master=True, wait_for_workers=False)
        names.answering.clear()
        served = threading.Event()
        with socket.create_connection((address, store.port)):
            threading.Thread(target=use, args=(store, served), daemon=True).start()
            waits = not served.wait(1.0)
            asked = len(names.questions)
            names.answering.set()
            faults.report(**{hosts: {"asked": asked, "waits": waits, "served": served.wait(30.0)}})


@pytest.mark.namespaces
@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_the_store_serves_nobody_while_it_asks_for_the_name_of_who_connects(tmp_path: Path) -> None:
    with faults.Hosts(1) as hosts:
        result = faults.run_ranks(
            serve_while_somebody_connects,
            1,
            args=[hosts.address("host0"), str(tmp_path)],
            hosts=hosts,
            timeout=LIMIT,
        ).check()
    found = result[0].reports
    assert found["without names"]["asked"] > 0 and found["without names"]["waits"], found
    assert found["without names"]["served"], found
    assert found["as made"]["asked"] == 0 and found["as made"]["served"], found


def test_a_lost_answer_costs_the_ranks_of_a_job_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody has said what it may cost."""
    monkeypatch.delenv("RES_OPTIONS")
    assert environment_of(None, None)["RES_OPTIONS"] == "timeout:1 attempts:1"
    assert environment_of({"RES_OPTIONS": "ndots:2"}, None)["RES_OPTIONS"] == "ndots:2"


def name_of_the_loopback() -> None:
    faults.report(name=socket.gethostbyaddr("::ffff:127.0.0.1")[0], hosts=Path("/etc/hosts").read_text())


@pytest.mark.skipif(os.geteuid() != 0, reason="another /etc/hosts needs root")
def test_ranks_of_this_host_need_no_name_server_either_and_its_own_names_stay() -> None:
    before = Path("/etc/hosts").read_text()
    result = faults.run_ranks(name_of_the_loopback, 1, timeout=LIMIT, launcher="fork").check()
    assert result[0].reports["name"] == "localhost.mapped"
    assert result[0].reports["hosts"].startswith(before)
    assert Path("/etc/hosts").read_text() == before
