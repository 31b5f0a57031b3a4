"""Every widening in the kernels is needed: without it, alone, the proof turns red."""

from bigpool.proof.arms import kernel_modules
from bigpool.proof.mutants import survey
from bigpool.proof.narrow import list_widenings
from bigpool.proof.runner import Options

# Small cases that between them take every index of the kernels past 2^31.
CASES = (
    *("verify-page-one", "verify-ragged", "verify-far-rows", "verify-far-heads"),
    *("prefill-ragged", "prefill-far-rows", "prefill-far-heads", "prefill-far-context"),
    *("write-kv-plain", "write-kv-far-heads", "merge-far-tokens", "merge-far-heads"),
)


def test_proof_is_red_without_any_one_widening():
    widenings = [(module, *place) for module, path in kernel_modules().items() for place in list_widenings(path.read_text())]
    mutants = survey(Options(cases=CASES, device="cpu"))
    assert [(mutant.module, mutant.line, mutant.col, mutant.text) for mutant in mutants] == widenings
    assert len(mutants) >= 6
    unseen = [f"{mutant.module}:{mutant.line} {mutant.text}" for mutant in mutants if not mutant.seen_by]
    assert not unseen, f"no case sees that these are gone: {unseen}"
