"""Classes of cause that lie in machines and links: GPUs, shared memory, interfaces, fabric, the store."""

from __future__ import annotations

from ncclguard.explain.case import Case, Finding
from ncclguard.explain.facts import Fact, Kind
from ncclguard.explain.parse_transport import nccl_error_family

# NVIDIA's Xid catalogue: those that point at the GPU, its memory or its link.
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})


def hardware(case: Case) -> Finding | None:
    xids = [fact for fact in case.evidence.of(Kind.XID) if fact.number in HARDWARE_XIDS]
    broken = [
        f
        for f in case.evidence.of(Kind.CUDA, Kind.EXCEPTION, Kind.NCCL_WARN)
        if "ECC error" in f.text or "fallen off the bus" in f.text or f.name == "hardware"
    ]
    if xids or broken:
        what = f"Xid {xids[0].number}" if xids else "an ECC error or a lost GPU"
        return Finding("gpu_hardware", "high", f"the driver reports {what}", xids + broken)
    return None


def shared_memory(case: Case) -> Finding | None:
    words = ("/dev/shm", "shared memory segment", "shared memory (shm)", "insufficient shared memory")
    facts = [
        f
        for f in case.evidence.of(Kind.NCCL_WARN, Kind.EXCEPTION, Kind.DATALOADER)
        if f.name == "shm" or any(word in f.text or word in f.detail for word in words)
    ]
    return Finding("shared_memory", "high", "shared memory could not be had", facts) if facts else None


def iommu(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.of(Kind.NOTE) if fact.name == "iommu_fault"]
    return Finding("p2p_acs_iommu", "high", "the IOMMU refused a device's access", facts) if facts else None


def transport_mismatch(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.of(Kind.NCCL_WARN) if fact.name == "size_mismatch"]
    facts += case.evidence.of(Kind.GLOO_ABORT)
    return (
        Finding("mismatch_shape_or_op", "high", "the two ends of one transfer disagree about its size", facts)
        if facts
        else None
    )


def network(case: Case) -> Finding | None:
    warnings = case.evidence.of(Kind.NCCL_WARN)
    errors = [
        f
        for f in case.evidence.of(Kind.EXCEPTION, Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION)
        if nccl_error_family(f.name + " " + f.text + " " + f.detail)
    ]
    families = [(fact, fact.name) for fact in warnings] + [
        (fact, nccl_error_family(fact.text + " " + fact.detail) or "") for fact in errors
    ]

    def of(*names: str) -> list[Fact]:
        return [fact for fact, family in families if family in names]

    primary = [fact for fact in of("ib", "ib_async") if fact.number != 5]
    if primary:
        return Finding(
            "network_fabric",
            "high",
            "InfiniBand or RoCE completed with an error; status 5 lines are flushes that follow",
            primary,
        )
    if of("topology"):
        return Finding("library_bug", "low", "ranks disagree about one communicator's topology", of("topology"))
    if of("no_interface"):
        return Finding("network_interface", "high", "NCCL found no interface to use", of("no_interface"))
    if of("connect"):
        return Finding(
            "network_interface",
            "medium",
            "a connection was refused or timed out at set-up: an address that the peer cannot reach",
            of("connect"),
        )
    if of("p2p"):
        return Finding("p2p_acs_iommu", "medium", "GPU peer-to-peer could not be used", of("p2p"))
    if of("oom"):
        return Finding("oom_or_crash_other_rank", "medium", "NCCL could not allocate memory on a rank", of("oom"))
    if of("version"):
        return Finding("library_bug", "medium", "ranks load different NCCL versions", of("version"))
    if of("closed") and not case.waiting:
        return Finding("network_fabric", "low", "a connection broke in mid-transfer", of("closed"))
    setup = of("system", "internal")
    if setup and not case.waiting:
        return Finding(
            "network_interface",
            "low",
            "NCCL failed outside any collective and says no more; between hosts that is most often the chosen "
            "interface",
            setup,
        )
    return None


def store(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.RENDEZVOUS)
    if facts:
        return Finding("store_rendezvous", "high", "the rendezvous did not complete", facts)
    lost = [f for f in case.evidence.of(Kind.STORE_KEY) if "imeout" not in f.detail and "timed out" not in f.detail]
    if lost:
        return Finding("store_rendezvous", "medium", "the store was lost while communicators were set up", lost)
    return None


def first_use(case: Case) -> Finding | None:
    rows = [row for row in case.evidence.rows if row.waiting and row.seq is not None]
    nothing = bool(rows) and all(
        (row.seq or 0) <= 2 and row.completed is not None and row.completed <= 0 for row in rows
    )
    if (
        nothing
        and not case.verdict.culprits
        and case.world.size is not None
        and case.world.size <= 8
        and {row.rank for row in rows} >= set(range(case.world.size))
    ):
        return Finding(
            "p2p_acs_iommu",
            "low",
            "the first collective never completed and all ranks are in it: the transport between the GPUs",
            [row.facts[0] for row in rows],
        )
    return None
