"""Faults of the development set, each confirmed at the wall that stands on its line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from audit_cases._format import Kernel, kernels
from bigpool.audit.run import Options
from bigpool.confirm.confirm import Confirmer
from confirm_cases import launched

ELEMENTS = 1 << 21
# Page, slot and row ids, programs, chained indices, a counted base; loads, stores and atomics; one of a tile.
CHOSEN = (
    "a_page_ids.latent_page",
    "a_page_ids.slot_update_partly_fixed",
    "b_token_rows.permute_rows",
    "b_token_rows.packed_queries_partly_fixed",
    "b_token_rows.row_atomics",
    "c_program_ids.norm_rows",
    "c_program_ids.vocabulary_loss",
    "c_program_ids.tile_rows",
    "d_flat_numel.compact",
    "f_chained.token_state",
    "h_strides.fused_projection",
    "h_strides.constexpr_stride",
)
KERNELS = [kernel for kernel in kernels() if str(kernel) in CHOSEN]


@pytest.fixture(scope="module")
def confirmer() -> Iterator[Confirmer]:
    with Confirmer() as made:
        yield made


def test_all_are_there() -> None:
    assert [str(kernel) for kernel in KERNELS] == list(CHOSEN)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_expected_fault_is_confirmed_at_its_wall(confirmer: Confirmer, kernel: Kernel) -> None:
    found = launched(kernel, ELEMENTS)
    report = found.report(Options())
    assert report.skipped_kernels == []
    expected = {one.line: one for one in kernel.expected}
    report.findings = [finding for finding in report.findings if finding.primary.span.line in expected and finding.severity]
    assert report.findings
    for finding, made in zip(report.findings, confirmer.confirm(report, found), strict=True):
        assert made.outcome == "confirmed", made.text
        want = expected[finding.primary.span.line]
        if finding.rule in want.rules and made.variable == want.symbol:
            assert made.at == want.wall
