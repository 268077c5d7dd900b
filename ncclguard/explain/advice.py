"""What to do next, by class of cause and by what is still missing to be sure."""

from __future__ import annotations

from ncclguard.explain.verdict import Verdict, ranks_text

_BY_CLASS: dict[str, tuple[str, ...]] = {
    "rank_divergence": (
        (
            "Look for a branch that only some ranks take around this point: `if is_main_process`, an early stop or "
            "a best-model test on a rank-local value, "
            "a module that is skipped when a batch holds no image. Let one rank decide and broadcast, or run the "
            "branch on all ranks."
        ),
    ),
    "unequal_batches": (
        "Give all ranks the same number of batches (drop_last, an even sampler), or wrap the loop in `Join`.",
    ),
    "slow_rank_side_work": (
        (
            "Move the work off the collective path: preprocess before the job, or let only that work run under a "
            "longer limit (a gloo group of its own with its own timeout)."
        ),
    ),
    "unused_params": (
        (
            "Some ranks produced no gradient for part of the model. Run the skipped module on a dummy input times "
            "zero, or set find_unused_parameters=True with DDP."
        ),
    ),
    "mismatch_shape_or_op": (
        (
            "Compare the tensor shapes that the ranks pass to this call: pad to a common size, or exchange the "
            "sizes first."
        ),
    ),
    "oom_or_crash_other_rank": (
        (
            "Read the failed rank's own traceback first; the timeouts of the others follow from it. For a killed "
            "process look into `dmesg -T` for the out-of-memory killer."
        ),
    ),
    "checkpoint_io": (
        (
            "Saving took longer than the limit. Save under a gloo group with a long timeout, or write "
            "asynchronously to local disk first."
        ),
    ),
    "dataloader_stall": (
        (
            "Find the sample that the loader of that rank was reading; set a `timeout` on the DataLoader and "
            "validate media files beforehand."
        ),
    ),
    "timeout_too_short": (
        "The awaited rank was working. Raise the timeout of this process group above the slowest legitimate step.",
    ),
    "network_interface": (
        (
            "Set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) on every host to an interface that the other hosts "
            "reach; exclude lo and docker0. `ncclguard doctor` checks it."
        ),
    ),
    "network_fabric": (
        (
            "Check the link between the named peers: `ibstat`, port counters, cable and switch; on RoCE also "
            "NCCL_IB_GID_INDEX and the lossless priority. Rerun nccl-tests between these two hosts."
        ),
    ),
    "p2p_acs_iommu": (
        (
            "Run once with NCCL_P2P_DISABLE=1. If that works, turn ACS and the IOMMU off in the firmware or use "
            "pass-through (iommu=pt)."
        ),
    ),
    "gpu_hardware": ("Take the host out of the job, note the Xid, run `nvidia-smi -q` and `dcgmi diag -r 3` on it.",),
    "store_rendezvous": (
        (
            "Check that MASTER_ADDR and MASTER_PORT reach the host of rank 0 from every host, and that all ranks "
            "start within the store's timeout."
        ),
    ),
    "shared_memory": ("Enlarge /dev/shm (docker: --shm-size=8g or --ipc=host).",),
    "library_bug": (
        "Compare the versions of torch and NCCL on all hosts, and search their issue trackers for this message.",
    ),
}


def advise(cause_class: str, verdict: Verdict, timeout_ms: int | None, stacks: bool) -> list[str]:
    """Return what to do next, the most telling first; the last lines are about getting more evidence."""
    lines: list[str] = []
    if verdict.culprits:
        lines.append(
            f"Look at the log and the stack of {ranks_text(verdict.culprits)} first; the ranks that printed the "
            f"timeout are the victims."
        )
    elif verdict.suspects:
        lines.append(
            f"Nobody can be named from these inputs. Look at {ranks_text(verdict.suspects)} first, and add the "
            f"logs of all ranks."
        )
    lines += _BY_CLASS.get(cause_class, ())
    if timeout_ms is not None:
        lines.append(
            f"The limit in force was {timeout_ms / 1000:g} s, as printed. If you set another one, it did not "
            f"reach this process group."
        )
    if not stacks:
        lines.append(
            "Next time have the stacks: run `py-spy dump --pid PID` on every rank while it hangs; set "
            "TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE "
            "before torch 2.9) and TORCH_NCCL_DUMP_ON_TIMEOUT=1, and pass the dumps to this command together "
            "with the logs."
        )
    if cause_class == "unknown":
        lines.append(
            "Pass the logs of every rank (torchrun --log-dir DIR -r 3), and `dmesg -T` of the hosts: one silent "
            "rank's last lines often settle it."
        )
    return lines
