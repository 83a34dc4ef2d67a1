"""The report, for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click
import msgspec

from swarm.cli.doctor.verdicts import Finding, Verdict

COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red", Verdict.UNKNOWN: "cyan"}
MARK = max(map(len, Verdict))
CHECK = 12


def text(finding: Finding) -> str:
    """One finding, coloured; what to do about it on a second line."""
    mark = click.style(f"{finding.verdict:<{MARK}}", fg=COLOURS[finding.verdict])
    first = f"{mark}  {finding.check:<{CHECK}}  {finding.found}"
    return f"{first}\n{'':{MARK + CHECK + 4}}→ {finding.remedy}" if finding.remedy else first


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    if counts[Verdict.FAILURE]:
        return f"{counts[Verdict.FAILURE]} of {len(findings)} checks failed."
    if counts[Verdict.WARNING]:
        return f"Nothing failed; {counts[Verdict.WARNING]} of {len(findings)} checks warn."
    return "All is well, as far as it could be found out."


def to_json(findings: Sequence[Finding]) -> bytes:
    """A list of objects with `check`, `verdict`, `found` and `remedy`."""
    return msgspec.json.encode([asdict(finding) for finding in findings])
