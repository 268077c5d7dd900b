"""The NCCL variables worth a sentence; :mod:`~ncclguard.environment.nccl_names` has the versions of all of them."""

from __future__ import annotations

from ncclguard.environment.nccl_names import NCCL_NAMES
from ncclguard.environment.variable import Kind, Reader, Variable

_GUIDE = "NCCL user guide, Environment Variables"


def _nccl(
    name: str,
    default: str,
    sentence: str,
    source: str = _GUIDE,
    *,
    unit: str = "",
    kind: Kind = Kind.TEXT,
    choices: tuple[str, ...] = (),
    low: int | None = None,
    high: int | None = None,
    differs_per_host: bool = False,
) -> Variable:
    since, until = NCCL_NAMES[name]
    return Variable(
        name,
        Reader.NCCL,
        sentence,
        source,
        since=since,
        until=until,
        default=default,
        unit=unit,
        kind=kind,
        choices=choices,
        low=low,
        high=high,
        read_at="first NCCL communicator",
        differs_per_host=differs_per_host,
    )


NCCL_VARIABLES: tuple[Variable, ...] = (
    _nccl(
        "NCCL_SOCKET_IFNAME",
        "all but lo and docker*",
        "The interfaces for NCCL's sockets: prefixes separated by commas; a leading '^' excludes, a leading '=' asks "
        "for exact names.",
        "NCCL source, findInterfaces (src/misc/socket.cc, src/os/linux.cc)",
        differs_per_host=True,
    ),
    _nccl(
        "NCCL_SOCKET_FAMILY",
        "either, IPv4 first",
        "Restricts NCCL's sockets to one address family.",
        kind=Kind.CHOICE,
        choices=("AF_INET", "AF_INET6"),
    ),
    _nccl("NCCL_SOCKET_RETRY_CNT", "34", "How often a refused connection is tried again.", kind=Kind.INTEGER, low=0),
    _nccl("NCCL_SOCKET_RETRY_SLEEP_MSEC", "100", "Step by which the pause between tries grows.", unit="milliseconds"),
    _nccl("NCCL_SOCKET_POLL_TIMEOUT_MSEC", "0", "Saves CPU while a communicator is created; not a time limit."),
    _nccl("NCCL_SOCKET_NTHREADS", "by platform", "Threads that serve the sockets of one connection."),
    _nccl("NCCL_NSOCKS_PERTHREAD", "by platform", "Sockets for each of these threads."),
    _nccl("NCCL_NET", "IB, else Socket", "The network module by name: IB, Socket or that of a plug-in."),
    _nccl("NCCL_NET_PLUGIN", "libnccl-net.so", "The network plug-in to load."),
    _nccl(
        "NCCL_IB_DISABLE",
        "0",
        "1 makes NCCL use sockets although InfiniBand or RoCE is there.",
        kind=Kind.INTEGER,
        low=0,
        high=1,
    ),
    _nccl(
        "NCCL_IB_HCA",
        "all active ports",
        "The adapters to use: prefixes name[:port] separated by commas; '^' in front excludes, '=' is for exact names.",
        differs_per_host=True,
    ),
    _nccl(
        "NCCL_IB_TIMEOUT",
        "20 (18 before 2.23, 14 before 2.14)",
        "Exponent of the transport's timeout, 4.096 us x 2^value a try: 20 and 7 tries make about 30 s, 22 2 min.",
        kind=Kind.INTEGER,
        low=1,
        high=31,
    ),
    _nccl("NCCL_IB_RETRY_CNT", "7", "Tries of the InfiniBand transport.", kind=Kind.INTEGER, low=0, high=7),
    _nccl(
        "NCCL_IB_GID_INDEX",
        "-1 (found by NCCL; 0 before 2.21)",
        "The index of the address that RoCE uses on its port; it has to be a RoCE v2 one to cross a router.",
        kind=Kind.INTEGER,
        differs_per_host=True,
    ),
    _nccl("NCCL_IB_ROCE_VERSION_NUM", "2", "Which RoCE version the automatic choice of the address takes."),
    _nccl("NCCL_IB_SL", "0", "InfiniBand service level.", kind=Kind.INTEGER),
    _nccl("NCCL_IB_TC", "0", "InfiniBand traffic class: the lossless one of the fabric, where RoCE needs it."),
    _nccl("NCCL_IB_QPS_PER_CONNECTION", "1", "Queue pairs for each connection."),
    _nccl("NCCL_IB_RETURN_ASYNC_EVENTS", "1", "Ends communication on a fatal event of the adapter.", kind=Kind.INTEGER),
    _nccl("NCCL_IB_RESILIENCY_PORT_FAILOVER", "0", "Moves operations in flight to another port when one fails."),
    _nccl(
        "NCCL_BUFFSIZE",
        "4194304",
        "The buffer of each channel between two peers; more helps long-latency Ethernet; not a limit on message size.",
        unit="bytes",
        kind=Kind.INTEGER,
        low=4096,
    ),
    _nccl(
        "NCCL_P2P_DISABLE",
        "0",
        "1 forbids direct access between the GPUs of a host, NVLink included.",
        kind=Kind.INTEGER,
        low=0,
        high=1,
    ),
    _nccl("NCCL_P2P_LEVEL", "by topology", "How far apart two GPUs may be for direct access."),
    _nccl("NCCL_SHM_DISABLE", "0", "1 forbids shared memory between the ranks of a host.", kind=Kind.INTEGER),
    _nccl("NCCL_NVLS_ENABLE", "2", "NVLink SHARP; 2 is automatic."),
    _nccl("NCCL_CUMEM_ENABLE", "by driver", "Uses CUDA's virtual memory functions."),
    _nccl("NCCL_NET_GDR_LEVEL", "by topology", "How far apart GPU and adapter may be for GPUDirect RDMA."),
    _nccl("NCCL_CROSS_NIC", "2", "Whether a ring may use different adapters on different hosts; 2 is automatic."),
    _nccl("NCCL_ALGO", "by tuning", "Restricts the algorithms."),
    _nccl("NCCL_PROTO", "by tuning", "Restricts the protocols."),
    _nccl(
        "NCCL_COMM_BLOCKING", "by caller", "Overrides whether communicators block; 0 makes all of them non-blocking."
    ),
    _nccl(
        "NCCL_DEBUG",
        "none",
        "What NCCL logs; WARN names the peer of a connection that broke, INFO also shows what it chose at start.",
        kind=Kind.CHOICE,
        choices=("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    ),
    _nccl(
        "NCCL_DEBUG_SUBSYS",
        "INIT,BOOTSTRAP,ENV",
        "Which parts log at INFO; ALL logs every collective, which is much and slow.",
    ),
    _nccl("NCCL_DEBUG_FILE", "standard output", "Where the log goes; %h and %p stand for host and process."),
    _nccl(
        "NCCL_CONF_FILE",
        "~/.nccl.conf",
        "A file of NAME=value lines, read for names that are not in the environment; /etc/nccl.conf is read after it.",
    ),
    _nccl("NCCL_RAS_ENABLE", "1", "A thread that answers questions about the state of all communicators."),
    _nccl("NCCL_RAS_ADDR", "localhost:28028", "Where that thread listens."),
    _nccl("NCCL_HOSTID", "host name and boot id", "What NCCL tells hosts apart by.", "NCCL source, src/misc/utils.cc"),
    _nccl("NCCL_COMM_ID", "none", "Address of the bootstrap root, host:port.", differs_per_host=False),
)
