"""Whether a grammar can be compiled, found out in a process that is ended when it takes too long.

A schema of a few hundred characters can keep a compiler busy for longer than anybody waits (intersections of patterns
grow exponentially), and meanwhile no thread of its process runs. So the first try is not made in the gateway.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys

from llguidance import LLMatcher, LLParserLimits

SECONDS = 0.5
"""Of processor time."""

MEMORY = 2 << 30
"""Bytes."""

PATIENCE = 20.0
"""Seconds that the process may take on a machine that is busy."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=200_000,  # some 14 ms for a token at worst
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""What llguidance bounds itself."""

TOO_LONG = "it is too complex"


def trouble(grammar: str) -> str:
    """Why the grammar (in llguidance's Lark) cannot be compiled; empty if it can."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return TOO_LONG
    return done.stdout.decode() if done.returncode == 0 else TOO_LONG


def main() -> None:
    """Reads the grammar from stdin, writes what is wrong with it to stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # which ends the process, whatever it computes
    grammar = LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode())
    sys.stdout.buffer.write(LLMatcher.validate_grammar(grammar, limits=LIMITS).encode())


if __name__ == "__main__":
    main()
