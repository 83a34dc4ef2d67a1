"""Formats a view for the terminal: for each model a heading, a strip of blocks, missing blocks, and a table. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import click

from swarm.monitor.swarm_view import MissingBlocksView, ModelView, ServerView, SwarmView

BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
MISSING = "×"
FULL_BAR_RATIO = 2.0
"""A block's bar is full at this multiple of the median throughput, so the median is half a bar."""

TABLE_COLUMNS = (
    "blocks",
    "server",
    "peer",
    "state",
    "tokens/s",
    "queue",
    "cache free",
    "ping",
    "precision",
    "version",
    "audits",
)


def format_swarm(view: SwarmView, width: int = 100) -> str:
    """Format the view in lines of about `width` columns, with click's colors."""
    parts = []
    if view.problem:
        parts.append(click.style(f"{view.problem}", fg="red"))
    parts += [_model(model, width) for model in view.models]
    there = f"; it serves {', '.join(view.others)}" if view.others else ""
    parts += [click.style(f"{name}: no server of this swarm serves it{there}", fg="red") for name in view.absent]
    if view.left_out:
        parts.append(f"{view.left_out} more models are announced; give a model's name to see it")
    if not parts:
        parts.append("No models: this swarm has no servers yet. Start one with: swarm server MODEL")
    return "\n\n".join(parts)


def bar_character(throughput: float, median: float) -> str:
    """The bar character of a served block."""
    share = min(1.0, throughput / (median * FULL_BAR_RATIO)) if median > 0 else 1.0
    return BAR_CHARACTERS[min(len(BAR_CHARACTERS) - 1, int(share * len(BAR_CHARACTERS)))]


def block_strip(model: ModelView, width: int) -> str:
    """Format one character per block, in lines that begin with the number of their first block."""
    margin = len(str(model.blocks)) + 1
    line_length = max(10, (width - margin) // 10 * 10)
    lines = []
    for first in range(0, model.blocks, line_length):
        cells = [_cell(model, block) for block in range(first, min(first + line_length, model.blocks))]
        lines.append(f"{first:>{margin - 1}} " + "".join(cells))
    return "\n".join(lines)


def _cell(model: ModelView, block: int) -> str:
    view = model.coverage[block]
    if not view.servers:
        return click.style(MISSING, fg="red", bold=True)
    color = "yellow" if block == model.weakest else "green"
    return click.style(bar_character(view.throughput, model.median), fg=color)


def _model(model: ModelView, width: int) -> str:
    lines = [_heading(model), block_strip(model, width), *(_missing(missing) for missing in model.missing)]
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
        weakest = f", weakest block {model.weakest} with {format_number(throughput)} tokens/s"
    elif model.complete:
        weakest = f", every block with {format_number(model.throughput)} tokens/s"
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
    rows = [TABLE_COLUMNS, *(_row(server) for server in servers)]
    if not any(server.audits for server in servers):
        rows = [row[:-1] for row in rows]
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell + " " * (width - display_width(cell)) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    for position, server in enumerate(servers, 1):
        if server.excluded:
            lines[position] += "\n    " + click.style(f"not used: {server.excluded}", fg="yellow")
        elif server.disputed:
            lines[position] += "\n    " + click.style(server.disputed, fg="yellow")
        if server.adapters:
            lines[position] += "\n    adapters: " + ", ".join(server.adapters)
    return "\n".join([click.style(lines[0], dim=True), *lines[1:]])


def _row(server: ServerView) -> tuple[str, ...]:
    how = "relayed " if server.relayed else ""
    ping = f"{server.round_trip * 1000:.0f} ms" if server.round_trip is not None else "?"
    return (
        f"{server.start}:{server.end}",
        server.name or "-",
        server.short_id,
        server.state,
        format_number(server.throughput),
        f"{server.queue * 1000:.0f} ms",
        f"{server.cache_tokens_free:,}",
        how + ping,
        _precision(server),
        server.version,
        _audits(server),
    )


def _audits(server: ServerView) -> str:
    if (audits := server.audits) is None:
        return "-"
    made = audits.agreed + audits.differed
    return f"{audits.agreed} of {made} agree" + (", not used" if audits.quarantined else "")


def _precision(server: ServerView) -> str:
    words = [server.dtype] if server.quantization == "none" else [server.quantization, server.dtype]
    if server.sparse:
        loss = server.perplexity_loss
        words.append("sparse" if loss is None else f"sparse ({loss:+.1%} perplexity)")
    if server.exit_blocks:
        words.append(f"exits at {', '.join(map(str, server.exit_blocks))}")
    return ", ".join(words)


def format_number(value: float) -> str:
    """Format a number with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def display_width(line: str) -> int:
    """Number of columns of a text on a terminal: wide East Asian characters take two, combining marks none."""
    widths = (0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
    return sum(widths)
