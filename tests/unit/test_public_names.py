"""The names that users type. One that goes, or a keyword that is renamed, breaks programs: change this on purpose."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ncclguard

GUARDED = {
    "safe_all_reduce": "tensor op group * timeout chunk_numel max_attempts atomic on_lost name",
    "safe_barrier": "group * timeout on_lost name",
    "safe_broadcast": "tensor src group * timeout chunk_numel max_attempts atomic on_lost name",
    "safe_all_gather": "tensor_list tensor group * timeout chunk_numel max_attempts atomic on_lost name",
    "safe_reduce_scatter": "output input_list op group * timeout chunk_numel max_attempts atomic on_lost name",
    "safe_all_gather_object": "object_list obj group * timeout max_attempts on_lost name",
    "safe_broadcast_object_list": "object_list src group * timeout max_attempts on_lost name",
}
NAMES = {
    *GUARDED,
    "Cause",
    "CollectiveFailed",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CorruptState",
    "ElasticLoader",
    "GuardConfig",
    "GuardConfigError",
    "GuardError",
    "Incident",
    "Outcome",
    "PeerFailed",
    "PeerLost",
    "ReplicaReport",
    "ReplicasDiffer",
    "SlowRanks",
    "__version__",
    "check",
    "check_replicas",
    "configure",
    "current_config",
    "get_adaptive_timeout",
    "join",
    "nccl_timeout_handler",
    "phase",
    "resilient_evaluate",
    "resilient_step",
    "setup_env",
    "setup_nccl_monitoring",
    "setup_nccl_timeout_env",
    "verified",
    "watch",
    "watch_numerics",
    "with_checksums",
}


def test_the_public_names() -> None:
    assert set(ncclguard.__all__) == NAMES
    assert len(ncclguard.__all__) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(ncclguard, name)
    assert name == "__version__" or inspect.getdoc(value)


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_the_arguments_of_the_guarded_collectives(name: str) -> None:
    parameters = inspect.signature(getattr(ncclguard, name)).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    assert " ".join([*positional, "*", *keywords]) == GUARDED[name]
    assert all(p.default is None for p in parameters if p.name in keywords or p.name == "group")


@pytest.mark.parametrize("name", ["faults", "weights"])
def test_packages_that_are_documented_are_there_without_an_import_of_their_own(name: str) -> None:
    assert getattr(ncclguard, name).__name__ == f"ncclguard.{name}"


@pytest.mark.processes
def test_the_import_takes_nothing_that_shards_parameters_along() -> None:
    """torch.distributed.tensor and FSDP, and what these import, take half a second of a core."""
    names = ["sympy", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"]
    look = f"import sys, ncclguard, torch; assert ncclguard.watch_numerics; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"
