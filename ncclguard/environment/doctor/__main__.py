"""``python -m ncclguard.environment.doctor``: the command without the entry point."""

from __future__ import annotations

import sys

from ncclguard.environment.doctor.command import main

sys.exit(main())
