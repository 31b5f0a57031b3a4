"""Proof that a kernel is right at any pool size: cases, placements, arms, isolation, judge, record.

`Case` and `Oracle` are what a case file needs; see docs/prove-your-kernel.md.
"""

from __future__ import annotations

from bigpool.proof.case import Case, Oracle

__all__ = ["Case", "Oracle"]
