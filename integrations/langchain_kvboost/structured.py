"""Structured output: what constrains an answer, and what makes an object of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from kvboost_rag.adapters import constrained
from kvboost_rag.adapters.tool_choice import is_forced

METHODS = ("json_schema", "function_calling", "json_mode")


def form_of(tools: Sequence[Mapping[str, Any]], tool_choice: Any, response_format: Any) -> constrained.Form | None:
    """What a call's answer must look like, or None where it is free.

    Without llguidance a forced choice is left to the model, and a response format is warned about: what comes out is
    parsed all the same, and the parser says what is wrong with it.

    Raises:
        ValueError: a response format that is none, or that cannot be enforced.
    """
    forced = bool(tools) and is_forced(tool_choice)
    if not forced and response_format is None:
        return None
    if not constrained.is_available():
        if response_format is not None:
            warnings.warn(f"response_format is not enforced: {constrained.INSTALL}", UserWarning, stacklevel=4)
        return None
    return constrained.tool_call(tools) if forced else constrained.of_response_format(response_format, tools)


def structured(model: BaseChatModel, schema: Any, method: str, include_raw: bool) -> Runnable[Any, Any]:
    """`model` behind a parser: what `with_structured_output` returns.

    Raises:
        ValueError: an unknown method, or no schema where one is needed.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise ValueError(f"method={method!r} needs a schema: a Pydantic class, a TypedDict or a JSON schema")
    traced = {"kwargs": {"method": method}, "schema": schema}
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    llm: Runnable[Any, Any]
    parser: Runnable[Any, Any]
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        llm = model.bind_tools([schema], tool_choice=name, structured_output_format=traced)
        by_key = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        parser = PydanticToolsParser(tools=[schema], first_tool_only=True) if is_class else by_key
    else:
        llm = model.bind(response_format=_response_format(schema), structured_output_format=traced)
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    return _with_raw(llm, parser) if include_raw else llm | parser


def _response_format(schema: Any) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    plain = convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": plain.get("title", "answer"), "schema": plain}}


def _with_raw(llm: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
