"""One campaign from beginning to end: start the swarm, watch it, attack it, and report."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop

from swarm.transport.p2p import quiet_hivemind
from tests.fuzz.bystander import Bystander, run_bystander, run_idle_loop
from tests.fuzz.campaign import Campaign, Plan, table
from tests.fuzz.kinds import load_kinds
from tests.fuzz.targets import Targets, run_targets
from tests.fuzz.watchers import Watch


@dataclass(frozen=True)
class Report:
    """What a campaign has found.

    Attributes:
        messages: how many were sent.
        text: for people, in Markdown.
        violations: what did not hold.
        logs: a folder with the processes' logs, kept if there are violations.
    """

    messages: int
    text: str
    violations: list[str]
    logs: Path | None = None


def run(
    plan: Plan,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> Report:
    """Run a campaign. Returns when everything that it started has ended.

    Args:
        only: names of kinds; empty for all.
    """
    torch.set_num_threads(1)
    quiet_hivemind()
    known = load_kinds()
    kinds = [known[name]() for name in only or known]
    with run_targets() as targets, run_idle_loop(str(targets.folder)) as idle:
        say(f"{len(targets.all)} processes are running; what they log is in {targets.folder}")
        watch = Watch(targets, idle)
        campaign = Campaign(targets, kinds, plan, say)
        with run_bystander(targets.swarm, targets.folder / "bystander.log") as bystander:
            say("a bystander writes texts; the attack begins")
            began = time.monotonic()
            uvloop.run(_attack(campaign, watch, bystander))
            seconds = time.monotonic() - began
        say("everything is sent; waiting until everything is given back")
        figures = uvloop.run(watch.judge())
        violations = [one for sent in campaign.sent.values() for one in sent.violations] + watch.violations
        if campaign.is_short:
            violations.append(f"only {campaign.messages} of {plan.messages} messages were sent in {seconds:.0f} s")
        logs = _keep_logs(targets) if violations else None
    sentence = f"{campaign.messages:,} messages in {seconds:.0f} s, seed {plan.seed}."
    listed = "\n".join(f"- {one}" for one in violations) or "No violations."
    text = "\n\n".join([table(campaign.sent), sentence, "\n".join(f"- {figure}" for figure in figures), listed])
    if logs is not None:
        text += f"\n\nLogs: {logs}"
    return Report(campaign.messages, text, violations, logs)


async def _attack(campaign: Campaign, watch: Watch, bystander: Bystander) -> None:
    watching = asyncio.create_task(watch.run(bystander))
    attacking = asyncio.create_task(campaign.run())
    await asyncio.wait({watching, attacking}, return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    attacking.cancel()
    with suppress(asyncio.CancelledError):
        await attacking
    with suppress(asyncio.CancelledError):
        await watching


def _keep_logs(targets: Targets) -> Path:
    kept = Path(tempfile.mkdtemp(prefix="fuzz-logs-"))
    for log in targets.folder.glob("*.log"):
        shutil.copy(log, kept)
    return kept
