"""The view as text for a terminal: a heading a model, the strip of blocks, what is missing, a table. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import click

from swarm.monitor.swarm_view import MissingBlocksView, ModelView, ServerView, SwarmView

LEVELS = "▁▂▃▄▅▆▇█"
MISSING = "×"
FULL = 2.0
"""Times the median throughput at which a block's bar is full, so that the median is half a bar."""

COLUMNS = ("blocks", "server", "peer", "state", "tokens/s", "queue", "cache free", "ping", "precision", "version")


def text(view: SwarmView, width: int = 100) -> str:
    """The whole view in lines of about `width` columns, with colours as click's styles."""
    parts = []
    if view.problem:
        parts.append(click.style(f"{view.problem}", fg="red"))
    parts += [_model(model, width) for model in view.models]
    parts += [click.style(f"{name}: nobody of this swarm serves it", fg="red") for name in view.absent]
    if view.left_out:
        parts.append(f"{view.left_out} more models are announced; name one to see it")
    if not parts:
        parts.append("No models: nobody serves anything in this swarm yet. Start with: swarm server MODEL")
    return "\n\n".join(parts)


def level(throughput: float, median: float) -> str:
    """The bar of one served block."""
    share = min(1.0, throughput / (median * FULL)) if median > 0 else 1.0
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]


def strip(model: ModelView, width: int) -> str:
    """One character a block, over as many lines as needed, each with the number of its first block in front."""
    margin = len(str(model.blocks)) + 1
    room = max(10, (width - margin) // 10 * 10)
    lines = []
    for first in range(0, model.blocks, room):
        cells = [_cell(model, block) for block in range(first, min(first + room, model.blocks))]
        lines.append(f"{first:>{margin - 1}} " + "".join(cells))
    return "\n".join(lines)


def _cell(model: ModelView, block: int) -> str:
    view = model.coverage[block]
    if not view.servers:
        return click.style(MISSING, fg="red", bold=True)
    colour = "yellow" if block == model.weakest else "green"
    return click.style(level(view.throughput, model.median), fg=colour)


def _model(model: ModelView, width: int) -> str:
    lines = [_heading(model), strip(model, width), *(_missing(missing) for missing in model.missing)]
    if model.servers:
        lines += ["", _table(model.servers)]
    if model.servers_total > len(model.servers):
        lines.append(f"... and {model.servers_total - len(model.servers)} more servers")
    return "\n".join(lines)


def _heading(model: ModelView) -> str:
    gaps = sum(gap.end - gap.start for gap in model.missing)
    lacking = "1 block is missing" if gaps == 1 else f"{gaps} blocks are missing"
    state = click.style("complete", fg="green") if model.complete else click.style(lacking, fg="red")
    weakest = ""
    if model.weakest is not None:
        throughput = model.coverage[model.weakest].throughput
        weakest = f", weakest block {model.weakest} with {number(throughput)} tokens/s"
    elif model.complete:
        weakest = f", every block with {number(model.throughput)} tokens/s"
    servers = "1 server" if model.servers_online == 1 else f"{model.servers_online} servers"
    return f"{click.style(model.name, bold=True)}: {model.blocks} blocks, {servers}, {state}{weakest}"


def _missing(missing: MissingBlocksView) -> str:
    line = click.style(f"{MISSING} blocks {missing.start}:{missing.end} are missing", fg="red")
    if missing.joining:
        line += f"; {missing.joining} joining now"
    if missing.command is not None:
        line += f". Serve them:\n    {missing.command}"
    return line


def _table(servers: Sequence[ServerView]) -> str:
    rows = [COLUMNS, *(_row(server) for server in servers)]
    widths = [max(map(columns_of, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell + " " * (width - columns_of(cell)) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    for number, server in enumerate(servers, 1):
        if server.excluded:
            lines[number] += "\n    " + click.style(f"not used: {server.excluded}", fg="yellow")
        if server.adapters:
            lines[number] += "\n    adapters: " + ", ".join(server.adapters)
    return "\n".join([click.style(lines[0], dim=True), *lines[1:]])


def _row(server: ServerView) -> tuple[str, ...]:
    how = "relayed " if server.relayed else ""
    ping = f"{server.round_trip * 1000:.0f} ms" if server.round_trip is not None else "?"
    precision = server.dtype if server.quantization == "none" else f"{server.quantization}, {server.dtype}"
    return (
        f"{server.start}:{server.end}",
        server.name or "-",
        server.short_id,
        server.state,
        number(server.throughput),
        f"{server.queue * 1000:.0f} ms",
        f"{server.cache_tokens_free:,}",
        how + ping,
        precision,
        server.version,
    )


def number(value: float) -> str:
    """Three digits are enough for people."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def columns_of(line: str) -> int:
    """Columns that a text takes on a terminal: letters of East Asia take two, marks above letters none."""
    widths = (0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
    return sum(widths)
