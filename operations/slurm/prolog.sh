#!/bin/bash
# Prolog of slurm.conf, on each host before a job: does its hardware work? As root, and without the job's environment, so
# only checks that do not depend on that count. A prolog that fails drains the host and queues the job again: this one
# fails only for an error of the checks below, and never because the doctor is missing, slow or broken itself.
set -u
export PATH="${NCCLGUARD_BIN:-/opt/ncclguard/bin}:/usr/local/bin:/usr/bin:/bin"
hardware='gpus|gpu links|shared memory|infiniband|pci|link'
log=${NCCLGUARD_PROLOG_LOG:-/var/log/ncclguard-doctor.json}

command -v ncclguard > /dev/null || { echo "prolog: ncclguard is not on $PATH, nothing is checked"; exit 0; }
timeout 60 ncclguard doctor --json "$log" > /dev/null 2>&1
code=$?
[ "$code" -eq 2 ] || exit 0 # 0: healthy; anything else is the doctor's own trouble, or the 60 s

broken=$(python3 - "$log" "$hardware" <<'PYTHON'
import json
import sys

report = json.load(open(sys.argv[1]))
for check in report["checks"]:
    if check["status"] == "error" and check["name"] in sys.argv[2].split("|"):
        print(f"{check['name']}: {check['detail']}")
PYTHON
) || exit 0
[ -n "$broken" ] || exit 0
echo "prolog: job ${SLURM_JOB_ID:-?} is not started on $(hostname -s): $broken"
exit 1
