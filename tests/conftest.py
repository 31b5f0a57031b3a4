"""Without a GPU the kernels run through Triton's interpreter, which has to be asked for before triton is imported."""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has its background jobs ignore interrupts, and the commands that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the cores: threads of torch that wait for each other on busy ones cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import torch

    HAS_GPU = torch.cuda.is_available()
except ImportError:
    HAS_GPU = False

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    import pytest

    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"))
