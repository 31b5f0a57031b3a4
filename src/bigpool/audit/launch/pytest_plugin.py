"""`pytest --bigpool-audit`: audits every Triton kernel that a test session launches.

The session fails if a finding is left. Launches are executed as they would be without it. With pytest-xdist each worker process
captures its own launches, which are not reported: run the audit without `-n`. Unless it is asked for, this loads nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..assume import Assumption
    from .capture import Capture


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("bigpool")
    group.addoption("--bigpool-audit", action="store_true", help="audit the Triton kernels that the tests launch")
    group.addoption(
        "--bigpool-audit-assume",
        action="append",
        default=[],
        metavar="BOUND",
        help="such as 'page < 2**20', or a TOML file; repeatable",
    )
    group.addoption(
        "--bigpool-audit-fail-on",
        choices=("low", "medium", "high", "never"),
        default="low",
        help="the least confidence of a finding that fails the session",
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("--bigpool-audit") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_session(config), "bigpool-audit")


def _session(config: Any) -> Session:
    """Says what is wrong before a test has run."""
    import pytest

    from ...errors import ArgumentError
    from ..assume import read

    try:
        bounds = read(config.getoption("--bigpool-audit-assume"), {})
    except ArgumentError as error:
        raise pytest.UsageError(str(error)) from None
    if find_spec("triton") is None:
        remedy = "pip install 'bigpool[kernels]', or 'bigpool[cpu]' without a GPU"
        raise pytest.UsageError(f"--bigpool-audit: expected triton to be installed, got no such module; {remedy}")
    return Session(tuple(bounds), config.getoption("--bigpool-audit-fail-on"))


class Session:
    """Captures from the first test to the last."""

    def __init__(self, bounds: tuple[Assumption, ...], fail_on: str) -> None:
        self.bounds = bounds
        self.fail_on = fail_on
        self.stack = ExitStack()
        self.found: Capture | None = None
        self.lines: list[str] = []

    def pytest_sessionstart(self) -> None:
        from .capture import capture

        self.found = self.stack.enter_context(capture())

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        from ..finding import FAIL_ON
        from ..report import FORMATS
        from ..run import Options
        from .cache import default_folder

        self.stack.close()
        if self.found is None or not self.found.launches:
            return
        report = self.found.report(Options(bounds=self.bounds, fail_on=FAIL_ON[self.fail_on], cache=default_folder()))
        self.lines = list(FORMATS["full"](report, False))
        if report.status and exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("bigpool audit")
        for line in self.lines or ["no Triton kernel was launched"]:
            terminalreporter.write_line(line)
