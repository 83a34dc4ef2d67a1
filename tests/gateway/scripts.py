"""What a scripted model answers, and the tool that it calls."""

from __future__ import annotations

from tests.scripted import CHAT_TEMPLATE

MODEL = "scripted"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
SCRIPTS = {
    "weather?": f"I shall look.\n{CALL}\n{SECOND}",
    "unknown?": '<tool_call>\n{"name": "rm", "arguments": {"path": "/"}}\n</tool_call>',
    "12": "It is 12 degrees there.",
    "json?": '{"answer": 42, "why": "because"}',
    "think?": "<think>\nIt was asked.\n</think>\n\nSo it is.",
    "hmm,": " and once more, it is so.",
}
TEMPLATE = "{% if tools %}{# <tool_call> </tool_call> #}{% endif %}" + CHAT_TEMPLATE
TEMPLATE += "{% if enable_thinking is false %}{{ '<think></think>hmm,' }}{% endif %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
EXPECTED = [("weather", {"city": "Zürich"}), ("weather", {"city": "Bern", "days": 2})]
"""The calls in the answer to `weather?`."""
