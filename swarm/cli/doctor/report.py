"""Formats the report as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click
import msgspec

from swarm.cli.doctor.verdicts import Finding, Verdict

COLORS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red", Verdict.UNKNOWN: "cyan"}
MARK_WIDTH = max(map(len, Verdict))
CHECK_WIDTH = 12


def format_finding(finding: Finding) -> str:
    """Format one finding in color, with its remedy on a second line."""
    mark = click.style(f"{finding.verdict:<{MARK_WIDTH}}", fg=COLORS[finding.verdict])
    first = f"{mark}  {finding.check:<{CHECK_WIDTH}}  {finding.found}"
    return f"{first}\n{'':{MARK_WIDTH + CHECK_WIDTH + 4}}→ {finding.remedy}" if finding.remedy else first


def format_summary(findings: Sequence[Finding]) -> str:
    """Format the last line of the report."""
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    if counts[Verdict.FAILURE]:
        return f"{counts[Verdict.FAILURE]} of {len(findings)} checks failed."
    if counts[Verdict.WARNING]:
        return f"No check failed; {counts[Verdict.WARNING]} of {len(findings)} checks warn."
    return "No problems found."


def to_json(findings: Sequence[Finding]) -> bytes:
    """Encode a list of objects with `check`, `verdict`, `found` and `remedy`."""
    return msgspec.json.encode([asdict(finding) for finding in findings])
