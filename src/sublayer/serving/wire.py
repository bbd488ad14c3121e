"""OpenAI's requests as they come over the wire: what each field may be, and what is not supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..config import unknown
from ..data import Tokenizer
from ..generation.constraint import Grammar, grammar_of

# Fields that change nothing about an answer here; clients send them as a matter of course.
IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "verbosity",
}  # fmt: skip
# Fields that would change it, and the values at which they do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []),
    "function_call": (None, "none", "auto"), "modalities": (None, ["text"]), "audio": (None,),
    "prediction": (None,), "reasoning_effort": (None, "none"),
    "web_search_options": (None,), "suffix": (None, ""), "echo": (None, False), "best_of": (None, 1),
}  # fmt: skip
INT64 = 2**63

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,11}$"}}),
]
Word = Annotated[str, Field(min_length=1)]


class Refused(ValueError):
    """A request that is wrong, and which of its fields."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("the body must be a JSON object")
        for name, value in values.items():
            same = [value == one and type(value) is type(one) for one in UNSUPPORTED.get(name, ())]  # 0 is not False
            if same and name not in cls.model_fields and not any(same):
                raise ValueError(f"{name} is not supported by this server; leave it out")
            if name not in cls.model_fields and name not in IGNORED and name not in UNSUPPORTED:
                raise ValueError(unknown("field", str(name), sorted(cls.model_fields)))
        return {name: value for name, value in values.items() if name in cls.model_fields}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool = False


class PlainFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object"]


class NamedSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # a schema is always kept to


class SchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["json_schema"]
    json_schema: NamedSchema


class Wish(Body):
    """What completions and chats have in common.

    Not OpenAI's are top_k, min_p and repetition_penalty, and regex and grammar, which bind an answer as a schema does.
    """

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: Word | Annotated[list[Word], Field(max_length=4)] | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    regex: str | None = None
    grammar: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: Bias | None) -> Bias | None:
        wrong = next((key for key in value or {} if not (key.isascii() and key.isdigit() and len(key) < 12)), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:40]!r} is no token; the keys are ids of tokens")
        return value

    def constraint(self, tokenizer: Tokenizer) -> Grammar | None:
        """The form that the answer must have, compiled."""
        format, found = self.response_format, dict[str, tuple[str, Any]]()
        if format is not None and format.type != "text":
            schema = format.json_schema.form if isinstance(format, SchemaFormat) else None
            found["response_format"] = ("json_schema", {"type": "object"} if schema is None else schema)
        found |= {name: (name, text) for name in ("regex", "grammar") if (text := getattr(self, name)) is not None}
        if len(found) > 1:
            raise Refused(f"{' and '.join(found)} exclude each other; give one", [*found][-1])
        for field, (kind, value) in found.items():
            try:
                return grammar_of(tokenizer, kind, value)
            except ValueError as error:
                raise Refused(str(error), field) from None
        return None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many likeliest tokens to tell in each place; None: nothing about probabilities."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The options of generation that were given; OpenAI's default temperature is 1."""
        bias = {int(key): value for key, value in (self.logit_bias or {}).items()}
        given = dict(
            temperature=1.0 if self.temperature is None else self.temperature, top_p=self.top_p, top_k=self.top_k,
            min_p=self.min_p, repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, logit_bias=bias,
        )  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


class CompletionBody(Wish):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(one, int) for one in self.prompt):
            return [[one for one in self.prompt if isinstance(one, int)]]
        return [one for one in self.prompt if isinstance(one, str | list)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    role: Word
    content: str | list[Part]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatBody(Wish):
    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _asked(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs set to true")
        return self

    @property
    def tokens_wanted(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingBody(Body):
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """A request, or one line that says what is wrong with it."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
        first = wrong[0]
        param = str(first["loc"][0])[:100] if first["loc"] else None
        same = [one["msg"].removeprefix("Value error, ") for one in wrong if one["loc"][:1] == first["loc"][:1]]
        message = " or ".join(dict.fromkeys(same))[:1000]
        raise Refused(message if param is None else f"{param}: {message}", param) from None
