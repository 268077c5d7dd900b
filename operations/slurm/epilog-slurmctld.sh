#!/bin/bash
# EpilogSlurmctld of slurm.conf, on the controller after each job: explain those that failed, from the file that
# --output named. For jobs whose batch script does not do so itself; the file has to be readable where this runs. It
# takes five minutes at most, at low priority, and always ends with 0.
set -u
export PATH="${NCCLGUARD_BIN:-/opt/ncclguard/bin}:/usr/local/bin:/usr/bin:/bin"
[ "${SLURM_JOB_EXIT_CODE:-0}" -ne 0 ] || exit 0
output=$(scontrol show job -o "$SLURM_JOB_ID" | tr ' ' '\n' | sed -n 's/^StdOut=//p')
[ -n "$output" ] || exit 0

# As the job's user: root writes nothing into a folder that a user may have filled with links.
as_user=()
if [ "$(id -u)" -eq 0 ]; then
    as_user=(runuser -u "$SLURM_JOB_USER" --)
    export HOME=/
fi
"${as_user[@]}" test -r "$output" || exit 0
nice -n 10 "${as_user[@]}" timeout 300 ncclguard explain "$output" \
    --json "$output.explain.json" --html "$output.explain.html" > /dev/null 2>&1
exit 0
