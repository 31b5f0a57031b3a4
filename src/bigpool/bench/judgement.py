"""From the samples of arms to verdicts: one for each arm and shape, and one over all shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigpool.bench import stats, verdict
from bigpool.bench.stats import Effect, Rounds
from bigpool.bench.verdict import MARGIN, MOST_NOISE, Verdict


@dataclass(frozen=True)
class Judge:
    """`base`: the arm that the others are compared with; `twin`: the same arm under another name, or None."""

    base: str
    twin: str | None = None
    margin: float = MARGIN
    seed: int = 0

    def shape(self, samples: Rounds) -> dict[str, Verdict]:
        """The verdict of every arm but the base and its twin, on one shape; of the twin where there is no other."""
        if self.base not in samples:
            return {}
        others = [name for name in samples if name != self.base]
        return {name: self._verdict([samples], name) for name in others if name != self.twin or len(others) == 1}

    def overall(self, runs: Mapping[str, Rounds]) -> dict[str, Verdict]:
        """The verdict of every arm over the shapes that it was timed on. `runs`: shape -> samples."""
        by_shape = {shape: self.shape(samples) for shape, samples in runs.items()}
        made = {}
        for name in dict.fromkeys(name for verdicts in by_shape.values() for name in verdicts):
            verdicts = {shape: found[name] for shape, found in by_shape.items() if name in found}
            made[name] = verdict.overall(verdicts, self._verdict([runs[shape] for shape in verdicts], name))
        return made

    def _verdict(self, runs: Sequence[Rounds], name: str) -> Verdict:
        twinned = self.twin is not None and all(self.twin in samples for samples in runs)
        noise = verdict.noise_of(self._effect(runs, str(self.twin)) if twinned else None, self.margin)
        return verdict.judge(self._effect(runs, name), noise, max(MOST_NOISE, self.margin))

    def _effect(self, runs: Sequence[Rounds], name: str) -> Effect:
        return stats.effect_of([stats.round_ratios(samples, self.base, name) for samples in runs], seed=self.seed)
