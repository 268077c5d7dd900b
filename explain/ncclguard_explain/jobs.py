"""Tell inputs of a distributed job from those of a plain program, a server or a host that has none.

Whoever pastes a shell's session or a kernel's log may have no job in it. What a plain program raises, and a browser
that the kernel killed, is no incident of one. In doubt it is: any word of ranks, launchers, communication, engines or
schedulers is a sign of a job.
"""

from __future__ import annotations

import re

from ncclguard_explain.facts import Fact, Kind

#: Words of ranks and their launchers, of communication, of engines, of trainers and of schedulers of several hosts.
_JOB = re.compile(
    rb"\[rank|\bRANK\b|(?i:_rank\b|world[_ ]?size|\branks\b)|"
    rb"torchrun|torch\.multiprocessing|torchelastic|elastic_launch|accelerate|(?i:deepspeed|horovod|colossalai|\baccelerator\b)|"
    rb"(?i:\bmpi|slurm)|prterun|\borted\b|\bsrun\b|sbatch|\bsacct\b|jsrun|\bflux[ -]|pdsh|\bclush\b|\b[rR]ay(?:let)?\b|TERM_[A-Z]|"
    rb"(?i:[nrhxle]ccl)|\bCCL_|[Gg]loo\b|\bUCX\b|c10d|TCPStore|EngineCore|(?i:nvshmem|all[-_ ]?(?:reduce|gather)|reduce[-_ ]?scatter|barrier|rendezvous|collective|"
    rb"process[ _]?group|vllm|sglang|trt-?llm|tensorrt|lmdeploy|deepep|mooncake|nixl|scheduler_\d|"
    rb"megatron|fsdp|\bddp\b|distributed|lightning|\bnemo\b|\bverl\b|openrlhf|\bslime\b|prime[-_]rl|torchtitan|torchft|maxtext|\bjax\b|\bxla\b|\btpu|libtpu|mindspeed|torch_npu|"
    rb"habana|\bhpu|gaudi|nproc|nnodes|num_(?:processes|nodes|machines)|multi-?node|parallel(?:ism|_size| size)|\bshard(?:ed|ing)\b|pytorchjob|jobset|kubeflow|volcano|"
    rb"sagemaker|nvrx|straggler|\b[tdpe]p[_-]size|megascale)|\bGPUs\b|\d ?[x*] ?[ABH]\d{2,3}\b|ncclguard|-worker-\d|\b(?:TP|DP|PP|EP)\d+\b"
)
#: A number of a rank, which is also a place in a list.
_RANK = re.compile(rb"\b[Rr][Aa][Nn][Kk][ _=:#\-]{0,2}\[?\d")
#: Words of training and inference, on one device or many.
_TRAINING = re.compile(
    rb"(?i:torch|tensor|cuda(?!_VISIBLE_DEVICES)|\bgpu\b|\bn?x?h?pu\b|rocm|\bhip|epoch|\bloss\b|\bsteps?\b(?! \d+/\d+ ?:)|\biter(?:ation)?s?\b|\btrain|checkpoint|\bmodel\b|\bllm|dataloader|optimizer|gradient|keras|transformers)"
)
#: A command of a shell, a notebook or an interpreter that runs a program by itself.
_PLAIN = re.compile(
    rb"(?m)^(?:\([\w.\- ]+\) ?)?(?:\[?[\w.\-]+@[\w.\-]+[:\s~\]][^$#%\n]{0,80}[$#%] ?|\$ |% |>>> |In ?\[\d+\]: ?|PS [A-Z]:[^>\n]{0,120}> ?|[A-Z]:\\[^>\n]{0,120}> ?)"
    rb"(?:(?:export|time|nice|env|sudo) )*(?:[A-Z_]+=\S* )*(?:\S*/)?(?:python[\d.]*|ipython3?|uv run|poetry run|pytest|bash|sh|\./|%run|!python)|(?m:^Cell In ?\[\d+\], line \d|^>>> \w)"
)
#: Servers, databases and their timers, and what builds images: programs that train nothing.
_SERVER = re.compile(
    rb"(?i:\bdjango|\bflask|gunicorn|\bcelery|\bnginx|postgres|\bmysql|\bredis\b|\bcron\b)|\"(?:GET|POST|PUT) /|(?m:^Step \d+/\d+ ?: [A-Z]|^In ?\[\d+\]:)|\bpip3? install|\bnpm "
)
#: Programs of jobs, as the kernel calls them; the names of threads too.
_OF_JOBS = re.compile(
    r"python|pt_|ray|VLLM|sglang|triton|trt|mpi|orted|torch|accelerate|deepspeed|slurm|train|julia|java|jax|uv|conda|ba?sh\b|xla|tpu|megatron"
)
#: Lines of what is no run of a program: a build's of an image (BuildKit), and those of rules for alerts.
_NO_RUN = re.compile(r"#\d+ (?:[\d.]+ |ERROR|\[)|(?:- )?(?:alert|expr|annotations|summary|description|record): ")
_KILLED = re.compile(r"\bprocess \d+ \(([^)]+)\)|\btask=([^,]+)")
#: Cards through which jobs speak; other links come and go on any host.
_FABRIC = re.compile(r"mlx|\bib\w*\d|hfi|\befa|\brdma|roce|\bena\b", re.IGNORECASE)
_LONG = 4 << 20  # bytes: a longer log is a job's, whatever it says
#: What other programs print too.
_OF_PROGRAMS = frozenset(
    {Kind.EXCEPTION, Kind.GLOO_CLOSED, Kind.RENDEZVOUS, Kind.STORE_TIMEOUT, Kind.STORE_LOST, Kind.DATALOADER, Kind.CUDA, Kind.WORKER_DIED}
)  # fmt: skip


class Signs:
    """Signs of a job in the bytes of all inputs."""

    def __init__(self) -> None:
        self.job = False
        self._training = self._plain = self._server = self._rank = False
        self._size = 0
        self._end: dict[int, bytes] = {}

    def read(self, source: int, data: bytes) -> None:
        """Take more bytes of an input; a word may stand across two parts."""
        self._size += len(data)
        self.job = self.job or self._size > _LONG
        if self.job:
            return
        data = self._end.get(source, b"") + data
        self._end[source] = data[-64:]
        self.job = _JOB.search(data) is not None
        if self.job:
            return
        self._rank = self._rank or _RANK.search(data) is not None
        self._training = self._training or _TRAINING.search(data) is not None
        self._plain = self._plain or _PLAIN.search(data) is not None
        self._server = self._server or _SERVER.search(data) is not None

    def foreign(self, fact: Fact) -> bool:
        """Return whether a fact is of a program or a host on which nothing tells of a job."""
        if _NO_RUN.match(fact.text):
            return True
        if self.job or (self._rank and (self._training or not self._server)):
            return False
        if fact.kind is Kind.KERNEL_OOM:
            killed = _KILLED.search(fact.detail)
            return killed is not None and _OF_JOBS.match(killed[1] or killed[2]) is None
        if fact.kind is Kind.NIC:
            return _FABRIC.search(fact.text) is None
        of_program = fact.kind in _OF_PROGRAMS or (fact.kind is Kind.EXIT and fact.name == "command")
        return (
            of_program
            and fact.name not in ("hardware", "gpu_hang", "npu")
            and (self._plain or (self._server and not self._training))
        )
