"""`python -m bigpool.audit SCRIPT ARGS...`."""

from __future__ import annotations

import sys

from .launch.script import main

if __name__ == "__main__":
    sys.exit(main())
