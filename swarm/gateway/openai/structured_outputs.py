"""The form that an answer has to have: OpenAI's `response_format`, and the fields that vLLM has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.refused_fields import unsupported
from swarm.generation.formats.response_format import AnswerForm

MAX_FORM_CHARACTERS = 1 << 16
MAX_ALTERNATIVES = 1024

JsonSchema = dict[str, Any] | str
"""A JSON schema, or its text."""

Pattern = Annotated[str, Meta(min_length=1, max_length=MAX_FORM_CHARACTERS)]
Alternatives = Annotated[list[Pattern], Meta(min_length=1, max_length=MAX_ALTERNATIVES)]


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """The value of vLLM's `structured_outputs`."""

    json: JsonSchema | None = None
    regex: Pattern | None = None
    choice: Alternatives | None = None
    json_object: bool | None = None
    # Refused, or about how vLLM does it.
    grammar: Any = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    disable_fallback: Any = None


_TAKEN = ("json", "regex", "choice", "json_object", "disable_fallback")


class FormFields(Struct, kw_only=True):
    """The fields of a request that ask for a form. At most one of them is given."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Alternatives | None = None

    def form(self) -> AnswerForm | None:
        """What the answer has to be; None for any text.

        Raises:
            BadRequest: several forms are asked for, or one that is not supported.
        """
        forms = [form for form in self._forms() if form.value.get("type") != "text"]
        if len(forms) > 1:
            names = " and ".join(form.parameter for form in forms)
            raise BadRequest(f"{names} ask for several forms; leave all but one of them out", param=forms[1].parameter)
        return forms[0] if forms else None

    def _forms(self) -> list[AnswerForm]:
        forms = []
        if self.response_format is not None:
            forms.append(AnswerForm(self.response_format))
        if (asked := self.structured_outputs) is not None:
            for name in asked.__struct_fields__:
                if name not in _TAKEN and getattr(asked, name) not in (None, False):
                    raise unsupported(f"structured_outputs.{name}", "use json, regex or choice")
            forms += _given("structured_outputs.", asked.json, asked.regex, asked.choice)
            if asked.json_object:
                forms.append(AnswerForm({"type": "json_object"}, "structured_outputs.json_object"))
        return forms + _given("guided_", self.guided_json, self.guided_regex, self.guided_choice)


def _given(prefix: str, schema: JsonSchema | None, regex: str | None, choice: list[str] | None) -> list[AnswerForm]:
    """Those of the forms that are given."""
    forms: list[AnswerForm] = []
    if schema is not None:
        name = f"{prefix}json"
        value = {"type": "json_schema", "json_schema": {"schema": _schema(schema, name)}}
        forms.append(AnswerForm(value, name))
    if regex is not None:
        forms.append(AnswerForm({"type": "regex", "regex": regex}, f"{prefix}regex"))
    if choice is not None:
        forms.append(AnswerForm({"type": "choice", "choice": choice}, f"{prefix}choice"))
    return forms


def _schema(schema: JsonSchema, name: str) -> Mapping[str, Any]:
    if not isinstance(schema, str):
        return schema
    try:
        decoded: dict[str, Any] = msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{name} is not a JSON schema: {error}", param=name, code="invalid_schema") from None
    return decoded
