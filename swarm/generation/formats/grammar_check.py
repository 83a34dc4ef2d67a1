"""Checks in a separate process whether a grammar can be compiled.

A schema of a few hundred characters can keep the compiler busy practically forever (intersections of patterns grow
exponentially), and no other thread of its process runs meanwhile. So the first attempt is made in a process that is
killed when it takes too long.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys

from llguidance import LLMatcher, LLParserLimits

from swarm.common.processes import module_command

MAX_CPU_S = 0.5
MAX_MEMORY_BYTES = 2 << 30

CHECK_TIMEOUT_S = 20.0
"""Wall-clock limit, for machines that are busy."""

PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=200_000,  # some 14 ms for a token at worst
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""llguidance's own limits."""

TOO_COMPLEX = "it is too complex"


def grammar_error(grammar: str) -> str:
    """Why the grammar (in llguidance's Lark) cannot be compiled; empty if it can."""
    command = module_command(__name__)
    try:
        done = subprocess.run(
            command, input=grammar.encode(), capture_output=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return TOO_COMPLEX
    return done.stdout.decode() if done.returncode == 0 else TOO_COMPLEX


def main() -> None:
    """Read the grammar from standard input, and write what is wrong with it to standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)  # which kills the process, whatever it is doing
    grammar = LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode())
    sys.stdout.buffer.write(LLMatcher.validate_grammar(grammar, limits=PARSER_LIMITS).encode())


if __name__ == "__main__":
    main()
