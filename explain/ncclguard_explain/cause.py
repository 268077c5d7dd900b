"""The words for what can go wrong with a collective, what each of them means, and what a person should do next."""

from __future__ import annotations

from enum import Enum

from ncclguard_explain.language import tr


class Cause(str, Enum):
    """Why an operation failed, and why a rank is to blame; the log analyser uses the same words."""

    LATE = "late"  # alive, running other code; has not entered this operation
    DIVERGED = "diverged"  # in another collective, or the same with another shape, dtype, reduce op or source
    FAILED = "failed"  # raised while its peers waited
    EXITED = "exited"  # left normally
    LOST = "lost"  # the process or host is gone, by positive evidence
    STUCK = "stuck"  # the process exists but its interpreter does not run
    NETWORK = "network"  # every rank arrived; the transfer itself stalled or broke
    UNKNOWN = "unknown"  # evidence is absent

    def __str__(self) -> str:
        return self.value


#: The word for each cause, for people.
WORD = {
    Cause.LATE: tr("late", "cause"),
    Cause.DIVERGED: tr("diverged", "cause"),
    Cause.FAILED: tr("failed", "cause"),
    Cause.EXITED: tr("exited", "cause"),
    Cause.LOST: tr("lost", "cause"),
    Cause.STUCK: tr("stuck", "cause"),
    Cause.NETWORK: tr("network", "cause"),
    Cause.UNKNOWN: tr("unknown", "cause"),
}

#: What each cause means, in words.
MEANING = {
    Cause.LATE: tr("alive, but running other code: it has not entered this operation"),
    Cause.DIVERGED: tr(
        "in another collective than the others, or the same with another shape, dtype, reduce op or source"
    ),
    Cause.FAILED: tr("raised an exception while the others waited"),
    Cause.EXITED: tr("left while the others waited"),
    Cause.LOST: tr("its process or host is gone"),
    Cause.STUCK: tr("its process exists, but its interpreter does not run"),
    Cause.NETWORK: tr("every rank was there; the transfer itself stalled or broke"),
    Cause.UNKNOWN: tr("nothing tells whose fault it was"),
}

SEE_LOST = tr("See the launcher's and the kernel's log of its host (exit code, out-of-memory killer, Xid).")

_COMPARE = tr(
    "Compare what the ranks called: a branch, a batch count or a shape depends on the rank. Make it equal, or agree on it "
    "first."
)
_LEFT = tr(
    "That rank finished or left early: it had fewer steps or batches, returned before the others, or called `sys.exit`, "
    "whose text is in its own output only."
)

#: What a person should do next, by cause.
ADVICE = {
    Cause.LATE: tr(
        "See in its stack what it was doing instead: work on one rank only (saving, metrics, a data loader) must "
        "fit the timeout or run on all ranks. Raise the timeout only if that work is meant to take so long."
    ),
    Cause.DIVERGED: tr(
        "{compare} Do not go on before: the ranks may be a call apart now, and calls that look alike then succeed with values "
        "of different steps. A `name=`, such as the step, and a phase are part of a call.",
        compare=_COMPARE,
    ),
    Cause.FAILED: tr("Fix the exception of that rank first: the others only waited for it."),
    Cause.EXITED: tr("{left} Unless the others made a call more than they should.", left=_LEFT),
    Cause.LOST: tr(
        '{see} Restart it, unless the job goes on without it (`resilient_step`, or on_lost="shrink").', see=SEE_LOST
    ),
    Cause.STUCK: tr(
        "Its process exists but its interpreter does not run: stopped, swapped out, or in a call that holds the GIL. "
        "Look at it on its host with `py-spy dump --pid`."
    ),
    Cause.NETWORK: tr(
        "Every rank was there: check the network between the hosts (`ncclguard doctor`), links and interface choice."
    ),
    Cause.UNKNOWN: tr("No evidence could be had: look at that rank's log and host."),
}

#: The same where it differs for a collective that the guard only watches.
ADVICE_WATCHED = {
    Cause.DIVERGED: _COMPARE,
    Cause.LOST: tr("{see} Restart the job: the groups of this rank are unusable.", see=SEE_LOST),
    Cause.NETWORK: tr(
        "{network} In a call with a source or destination compare that first: it is not recorded.",
        network=ADVICE[Cause.NETWORK],
    ),
}

#: Calls with a source or destination. They end there, or on who has sent its part, while the others still wait in them:
#: so one in the next call is ahead, and not astray.
ROOTED = frozenset(
    ["broadcast", "broadcast_object_list", "reduce", "gather", "gather_object", "scatter", "scatter_object_list"]
)

#: That of a call with a source or destination that only stands still.
ADVICE_SOURCE_FIRST = tr(
    "Compare the source or destination that each rank gives (`src=`, `dst=`): it is not recorded, and where it differs a call "
    "stands still like this. If it is the same everywhere: {network}",
    network=ADVICE[Cause.NETWORK],
)

#: That of ranks that have ended with the error of an earlier call, whose verdict is not known here.
ADVICE_ENDED_BY_EARLIER = tr(
    "An earlier call had failed there, and its error has ended that rank: the report of that failure, or the output of "
    "that rank, tells whose fault it was."
)

#: That of a call that differs, and has ended nevertheless.
ADVICE_ENDED_NEVERTHELESS = tr(
    "What it has given is not to be trusted on any rank, nor what was computed from it since: go on from a checkpoint of "
    "before it. {compare}",
    compare=_COMPARE,
)

#: That of an evaluation that some ranks call, and others do not.
ADVICE_EVALUATION_IN_PART = tr(
    "An evaluation is called on all ranks or on none, not under `if rank == 0:`: each rank takes part in it. Make that "
    "equal on all ranks. Do not go on before: the ranks may be a call apart now."
)

#: That of a call that differs, and of which a rank was aborted that is not known to be the odd one.
ADVICE_ABORTED_BY_OTHERS = tr(
    "{compare} gloo aborts (SIGABRT) a rank that is sent more than it expects: the one that is gone made a smaller "
    "call, and is not to blame for that.",
    compare=_COMPARE,
)

#: That of a watched rank that is lost, where nothing says that it has not aborted.
ADVICE_MAY_HAVE_ABORTED = tr(
    "{lost} On gloo a rank that calls with another size than the others aborts itself (SIGABRT).",
    lost=ADVICE_WATCHED[Cause.LOST],
)

#: That of a watched rank that has aborted.
ADVICE_ABORTED = tr(
    "It aborted itself (SIGABRT): the last lines of its own output say why. On gloo a call with another size than the "
    "others' does that, also one that only some ranks make (`if rank == 0:`). Mend that first: the job, which has to be "
    "started again, comes to the same place."
)

#: That of ranks whose call ended with KeyboardInterrupt, or with the SystemExit of a signal's handler.
ADVICE_INTERRUPTED = tr(
    "This was an interruption (Ctrl-C, or a launcher that ends its ranks), and there is no exception to fix. Where nobody "
    "pressed Ctrl-C, see what the launcher says before it."
)

#: That of a lost rank of a job that goes on by `resilient_step`.
ADVICE_GOES_ON = tr("{see} The others go on without it, where `resilient_step` can make the step again.", see=SEE_LOST)

#: That of a rank that is lost in an evaluation.
ADVICE_IN_EVALUATION = tr(
    '{see} Restart the job from its last checkpoint; with on_lost="checkpoint" and `save=`, `resilient_evaluate` saves one '
    "before it raises.",
    see=SEE_LOST,
)

#: That of a lost rank of a group outside the job, such as an engine in a channel of weights.
ADVICE_OUTSIDE = tr("{see} Start it again: it can join the others anew.", see=SEE_LOST)

#: All of these: what an incident may advise.
ALL_ADVICE = (
    *ADVICE.values(), *ADVICE_WATCHED.values(), ADVICE_ABORTED, ADVICE_GOES_ON, ADVICE_IN_EVALUATION, ADVICE_INTERRUPTED,
    ADVICE_MAY_HAVE_ABORTED, ADVICE_OUTSIDE,
)  # fmt: skip
