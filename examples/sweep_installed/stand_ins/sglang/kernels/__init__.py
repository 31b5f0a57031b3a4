"""The installed package of this name, without its registry."""

import sys

__path__ += [f"{path}/kernels" for path in sys.modules["sglang"].__path__[1:]]
