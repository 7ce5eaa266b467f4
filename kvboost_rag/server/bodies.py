"""Bodies of requests: every known field has a type, every unknown one is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvboost_rag.server.errors import ApiError

Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Body(BaseModel):
    """Strict: a string is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class Generation(Body):
    """What chat and completions have in common. None is what clients send for a parameter that they leave out."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    documents: Annotated[list[str | dict[str, Any]], Field(max_length=4096)] | None = None


class ChatBody(Generation):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    # What asks for nothing is taken; anything else is refused.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None


class CompletionBody(Generation):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=64)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None


class EmbeddingsBody(Body):
    model: str
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class DocumentBody(Body):
    """A document as text, which is cut here, or as the chunks that prompts will hold."""

    id: Annotated[str, Field(min_length=1, max_length=1024)]
    text: str | None = None
    chunks: list[str] | None = None


class DocumentsBody(Body):
    documents: Annotated[list[DocumentBody], Field(min_length=1, max_length=4096)]
    wait: bool = False
    stream: bool = False


class SwitchBody(Body):
    enabled: bool


def read(kind: type[Any], raw: bytes) -> Any:
    """A body of a kind.

    Raises:
        ApiError: not JSON, a field of another type or range, or one that is not known.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = next((str(part) for part in first["loc"] if isinstance(part, str)), None)
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body is no JSON: {first['msg']}", code="invalid_json") from None
        if first["type"] == "extra_forbidden":
            raise ApiError(400, f"{where}: not supported by this server", param, "unsupported_parameter") from None
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise ApiError(400, f"{where}: {first['msg']}", param, code) from None
