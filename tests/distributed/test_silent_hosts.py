"""A host that falls silent, without power or cut off: the others go on without it, and it ends, should it come back."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclguard.faults.hosts import Hosts, namespaces_available
from tests.distributed.hosts_cases import STEPS, WAYS, Job

REASON = namespaces_available()
pytestmark = [
    pytest.mark.usefixtures("preforked_programs"),
    pytest.mark.skipif(REASON is not None, reason=f"network namespaces are not available: {REASON}"),
]


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(getattr(request, "param", 3)) as made:
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_the_others_go_on_without_a_host_that_falls_silent(hosts: Hosts, tmp_path: Path, way: str) -> None:
    job = Job.begun(hosts, tmp_path, way)
    hosts.partition("host2")
    assert [job.code(index) for index in (0, 1)] == [0, 0], job.said(0)
    assert job.code(2) != 0  # nobody answers there: it cannot go on
    made = [job.made_by(step) for step in range(1, STEPS + 1)]
    assert all(len(said) == 1 for said in made), made  # one loss, and one opinion of who took part, on all
    whole = [step for step, said in enumerate(made, 1) if next(iter(said)).endswith("by (0, 1, 2, 3, 4, 5)")]
    assert whole == list(range(1, len(whole) + 1))
    assert 10 <= len(whole) < STEPS
    assert next(iter(made[-1])).endswith("by (0, 1, 2, 3)")
    assert "ranks 4-5 given up" in job.said(0)
    assert re.search(r"went on without ranks 4-5 after \d", job.said(0))


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_host_that_was_given_up_ends_when_it_is_back(hosts: Hosts, tmp_path: Path) -> None:
    """It is back when the others have gone on, and before it has given up itself; they are not disturbed."""
    job = Job.begun(hosts, tmp_path, "ddp")
    hosts.partition("host2")
    job.wait_until(lambda: "given up: no rank can reach it" in job.said(0))
    hosts.heal("host2")
    assert [job.code(index) for index in (0, 1)] == [0, 0], job.said(0)
    assert job.code(2) != 0
    last = max(int(step) for step in re.findall(r"^step (\d+) of", job.said(2), re.MULTILINE))
    assert len(job.made_by(last)) == 1
    assert job.made_by(STEPS).pop().endswith("by (0, 1, 2, 3)")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", [5], indirect=True)
def test_a_rank_is_killed_elsewhere_before_the_host_is_known_to_be_silent(hosts: Hosts, tmp_path: Path) -> None:
    """The verdict is on the killed one then, and the survivors' meeting finds out about the other."""
    job = Job.begun(hosts, tmp_path, "ddp", ranks=1)
    hosts.partition("host4")
    time.sleep(1.0)
    job.kill(2)
    assert [job.code(index) for index in (0, 1, 3)] == [0, 0, 0], job.said(0)
    assert [job.code(index) != 0 for index in (2, 4)] == [True, True]
    assert job.made_by(STEPS).pop().endswith("by (0, 1, 3)")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", [5], indirect=True)
def test_fewer_than_half_do_not_go_on_also_where_hosts_fall_silent_one_by_one(hosts: Hosts, tmp_path: Path) -> None:
    """The second falls silent while the others do without the first, and the third likewise: two of five are left."""
    job = Job.begun(hosts, tmp_path, "ddp", ranks=1, held=True)
    hosts.partition("host4")
    for given_up, next_host in (("4", "host3"), ("3", "host2")):
        job.wait_until(lambda rank=given_up: f"rank {rank} given up" in job.said(0))  # type: ignore[misc]
        hosts.partition(next_host)
        (tmp_path / f"next-after-{given_up}").touch()
    assert [job.code(index) != 0 for index in range(5)] == [True] * 5
    assert "went on" not in job.said(0)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_job_ends_where_most_ranks_have_fallen_silent(hosts: Hosts, tmp_path: Path) -> None:
    """The host of the store is then more likely the one that is cut off."""
    job = Job.begun(hosts, tmp_path, "ddp")
    hosts.partition("host0")
    assert all(job.code(index) != 0 for index in range(3))
    assert not any("went on" in job.said(index) for index in range(3))
