"""Stands before an installed sglang: its kernels are found where they are, without what importing all of it needs."""

import sys
from pathlib import Path

__path__ += [f"{path}/sglang" for path in sys.path if Path(path, "sglang/kernels/ops/attention/prefill_attention.py").is_file()]
