"""`swarm COMMAND`. Commands are imported when they are called, so that `swarm --help` is fast."""

from __future__ import annotations

import importlib

import click

from swarm.common.version import VERSION

COMMANDS = {
    "server": "swarm.server.__main__",
    "dht": "swarm.dht.__main__",
    "gateway": "swarm.gateway.__main__",
    "chat": "swarm.cli.chat.command",
    "doctor": "swarm.cli.doctor.command",
    "worker": "swarm.cli.worker",
    "ring": "swarm.cli.ring",
    "demo": "swarm.cli.demo",
    "plan": "swarm.cli.plan",
    "status": "swarm.cli.status",
    "monitor": "swarm.monitor.__main__",
    "members": "swarm.cli.members",
    "keys": "swarm.cli.keys",
    "digest": "swarm.cli.digest",
    "receipt": "swarm.cli.receipt",
    "points": "swarm.cli.points",
}


class LazyGroup(click.Group):
    """A command group that imports a command's module only when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).main
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="swarm")
def main() -> None:
    """Run large language models on many people's machines together, as one swarm."""


if __name__ == "__main__":
    main(prog_name="swarm")
