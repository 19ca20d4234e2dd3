"""The base of the wire's request bodies: unknown fields are refused by name, sizes bounded, errors in one line."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_TEXT_CHARS = 65_536  # characters of any other text
# The parser holds the GIL until it ends, and a container takes fifty times as long as a number.
MAX_JSON_BYTES = 2**24  # bytes of one JSON body; official clients split data into calls of about 10 MB
MAX_JSON_CONTAINERS = 2**16  # lists and objects in one JSON body: some 4,000 sequences
MAX_JSON_ITEMS = 2**21  # of all lists and objects in one JSON body; official clients send about 500,000


class BadRequest(ValueError):
    """A request that cannot be served as sent: the front end answers HTTP `status` with {"detail": message}."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class WireModel(BaseModel):
    """Base class of all bodies, and of their parts. `type` repeats what the endpoint or the place says."""

    model_config = ConfigDict(extra="forbid", strict=True, str_max_length=MAX_TEXT_CHARS, protected_namespaces=())

    type: str | None = Field(default=None, exclude=True)

    @classmethod
    def asks_nothing(cls, key: str, value: Any) -> bool:
        """Returns whether a field that is not defined here changes nothing: newer clients send some without a
        value."""
        return value in (None, [], {}, "")


M = TypeVar("M", bound=WireModel)


def parse_body(model: type[M], body: bytes) -> M:
    """Parses the body as `model`. Raises BadRequest with the first invalid or unknown fields."""
    check_json_size(body)
    try:
        return _parse(model, body)
    except ValidationError as error:
        raise BadRequest(_explain(error)) from None


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        if not all(_is_harmless(model, **each) for each in found):
            raise
    return model.model_validate_json(body, extra="ignore")


def _is_harmless(model: type[WireModel], type: str, loc: tuple[str | int, ...], input: Any, **_: Any) -> bool:
    """Returns whether an error is an unknown field that changes nothing. Of lists only the first error is known."""
    is_known = type == "extra_forbidden" and all(isinstance(key, str) for key in loc)
    return is_known and model.asks_nothing(str(loc[-1]), input)


def check_json_size(body: bytes) -> None:
    """Raises BadRequest (413) if parsing the body would take more than about a second.

    Brackets and commas inside strings count too: a text with so many of them is not a prompt.
    """
    if len(body) > MAX_JSON_BYTES:
        raise BadRequest(
            f"the body is longer than the {MAX_JSON_BYTES} bytes of JSON allowed: send several requests", 413
        )
    if body.count(b"[") + body.count(b"{") > MAX_JSON_CONTAINERS:
        raise BadRequest(f"the body has more than {MAX_JSON_CONTAINERS} lists and objects: send several requests", 413)
    if body.count(b",") > MAX_JSON_ITEMS:
        raise BadRequest(f"the body has more than {MAX_JSON_ITEMS} items: send several requests", 413)


def _explain(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    parts = [f"{'.'.join(map(str, e['loc'])) or 'the body'}: {_quote(**e)}" for e in found]
    return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")


def _quote(msg: str, type: str, **_: Any) -> str:
    return "not used here, leave it out" if type == "extra_forbidden" else msg.removeprefix("Value error, ")
