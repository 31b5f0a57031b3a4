"""`bigpool rule`: print what a rule of `bigpool audit` means."""

from __future__ import annotations

import click

from ..errors import ArgumentError


@click.command()
@click.argument("rule_id", required=False, metavar="[RULE]")
def rule(rule_id: str | None) -> int:
    """Print the documentation of a rule of `bigpool audit`, or list the rules.

    \b
    Example:
      bigpool rule BP101
    """
    from bigpool.audit.rules import RULES

    if rule_id is None:
        for one in RULES.values():
            click.echo(f"{one.id}  {one.title}")
        return 0
    if rule_id.upper() not in RULES:
        raise ArgumentError("bigpool rule", f"RULE: expected one of {', '.join(RULES)}, got {rule_id!r}; see bigpool rule")
    click.echo(RULES[rule_id.upper()].page, nl=False)
    return 0
