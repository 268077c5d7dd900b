"""`python -m ncclguard.explain PATH...`"""

from __future__ import annotations

import sys

from ncclguard.explain.command import main

if __name__ == "__main__":
    sys.exit(main())
