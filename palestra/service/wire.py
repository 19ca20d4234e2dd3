"""The JSON bodies of the training wire, as the three generations of official clients send and read them.

Requests are lenient about what is not ours (unknown fields are dropped, fields with a default may be missing, `type`
tags are never asked for) and strict about what is: types, and ranges beyond which a server would break. Bodies about
weights, searches and OpenAI's wire are in `wire_weights.py`, `wire_search.py` and `wire_openai.py`, replies in
`replies.py`. Arrays are taken apart in `codec.py`; whether they make sense for a base is `check.py`'s business.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

INT32, INT64, UINT64 = 2**31 - 1, 2**63 - 1, 2**64 - 1
EXACT = 2**53  # integers up to here survive a JSON reader that makes everything a float
MAX_ID = 256  # characters of a name or an id
MAX_TEXT = 65_536  # characters of any other text
MAX_CHAT = 4_000_000  # characters of one chat message or prompt
MAX_ENTRIES = 1024  # of a list or mapping of small things: tags, metadata, paths, stops
MAX_DATA = 65_536  # sequences in one training call
MAX_RANK = 512
MAX_SAMPLES = 4096
MAX_NEW_TOKENS = 1_048_576
MAX_TOPK = 256
MAX_TEMPERATURE = 1000.0
MIN_TEMPERATURE = 1e-5  # logits divided by less may exceed float32; vLLM, too, takes less for 0
MAX_RATE = 1e4  # of learning, and of weight decay
MAX_NORM = 1e30  # the largest norm to clip at that float32 still holds with room for sums
# The parser holds the interpreter until it is through, and a container costs it fifty times what a number does.
MAX_JSON = 2**24  # bytes of one JSON body: official clients cut their data into calls of at most some 10 MB
MAX_CONTAINERS = 2**16  # lists and objects in one JSON body: some 4,000 sequences
MAX_ITEMS = 2**21  # of all lists and objects in one JSON body; official clients send some 500,000
MAX_PROMPTS = 1024  # in one call for completions
MAX_TTL = 3660 * 86_400  # seconds: ten years, the official limit


class BadRequest(ValueError):
    """A request that cannot be served as it stands: the front end answers `status` with {"detail": message}."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Wire(BaseModel):
    """The base of every body."""

    model_config = ConfigDict(extra="ignore", strict=True, str_max_length=MAX_TEXT, protected_namespaces=())


M = TypeVar("M", bound=Wire)
Id = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=MAX_ID)]  # databases refuse a NUL
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
CheckpointName = Annotated[str, Field(pattern=r"^[.-]*[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
TinkerPath = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4 * MAX_ID)]
Metadata = Annotated[dict[str, Any], Field(max_length=MAX_ENTRIES)]
Slot = Annotated[int, Field(ge=0, le=INT32)]  # a model's or sampler's number within its session
SeqId = Annotated[int, Field(ge=0, le=INT32)]  # of a training request: the protobuf has 32 bits for it
Seed = Annotated[int, Field(ge=-INT64 - 1, le=UINT64)]  # 64 bits, with a sign or without
Ttl = Annotated[int, Field(ge=1, le=MAX_TTL)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Unit = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE)]
Token = Annotated[int, Field(ge=0, le=INT32)]
# fail_fast: of a million wrong numbers only the first is worth an error
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Numbers = Annotated[list[float], Field(fail_fast=True)]
Integers = Annotated[list[Annotated[int, Field(ge=0, le=INT64)]], Field(fail_fast=True)]


def parse(model: type[M], body: bytes) -> M:
    """The body read as `model`. Raises BadRequest that names the first fields that are wrong."""
    check_json(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise BadRequest(_explained(error)) from None


def check_json(body: bytes) -> None:
    """Raises BadRequest (413) for a body that would take the parser more than about a second.

    Brackets and commas within texts count, too: what has so many of them is no prompt.
    """
    if len(body) > MAX_JSON:
        raise BadRequest(f"the body is longer than the {MAX_JSON} bytes of JSON allowed: send several requests", 413)
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise BadRequest(f"the body has more than {MAX_CONTAINERS} lists and objects: send several requests", 413)
    if body.count(b",") > MAX_ITEMS:
        raise BadRequest(f"the body has more than {MAX_ITEMS} items: send several requests", 413)


def _explained(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    parts = [f"{'.'.join(map(str, e['loc'])) or 'the body'}: {e['msg'].removeprefix('Value error, ')}" for e in found]
    return "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")


# Bootstrap, sessions, telemetry


class CreateSessionRequest(Wire):
    tags: Annotated[list[str], Field(max_length=MAX_ENTRIES)] = []
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: Id | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(Wire):
    session_id: SessionId


class FinishReason(Wire):
    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSessionRequest(Wire):
    reason: FinishReason = FinishReason()
    detail: str | None = None


# Futures


class FutureRetrieveRequest(Wire):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(Wire):
    request_id: Id


class SamplingSessionTarget(Wire):
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, le=INT64)] = 0


class FuturesRetrieveRequest(Wire):
    target: SamplingSessionTarget
    prev_cursor: Annotated[int, Field(ge=0, le=INT64)] = 0
    timeout: NotNegative | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=MAX_DATA)] = []


# Models


class LoraConfig(Wire):
    """`alpha` is ours: official adapters have 32, whatever their rank."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 32
    alpha: Annotated[float, Field(gt=0, le=EXACT)] = 32.0
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Wire):
    type: str = "adamw"

    @field_validator("type")
    @classmethod
    def _adamw(cls, name: str) -> str:
        if name != "adamw":
            raise ValueError(f'this server has no optimizer "{name[:MAX_ID]}". Leave it out, or name "adamw".')
        return name


class CreateModelRequest(Wire):
    session_id: SessionId
    model_seq_id: Slot
    base_model: Id
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    rollout_correction_config: Metadata | None = None


class ModelRequest(Wire):
    """Of get_info and unload_model."""

    model_id: Id


# Training


class TensorData(Wire):
    """`data` is flat; with `sparse_*` it holds the listed cells of a matrix of `shape`, row by row (CSR)."""

    data: Numbers
    dtype: Literal["float32", "int64", "int32", "bfloat16"]
    shape: Annotated[Integers, Field(max_length=8)] | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class Chunk(Wire):
    """A run of token ids. The oldest clients send no `type`; only the tokens tell text from the rest."""

    tokens: Tokens

    @model_validator(mode="before")
    @classmethod
    def _text(cls, chunk: Any) -> Any:
        if isinstance(chunk, dict) and chunk.get("tokens") is None:
            kind = str(chunk.get("type", "unknown"))[:MAX_ID]
            raise ValueError(f'a chunk of type "{kind}" has no tokens. This server reads text only: send encoded_text.')
        return chunk


class ModelInput(Wire):
    chunks: Annotated[list[Chunk], Field(max_length=MAX_DATA, fail_fast=True)]


class JsonDatum(Wire):
    model_input: ModelInput
    loss_fn_inputs: Annotated[dict[str, TensorData], Field(max_length=MAX_ENTRIES)]


class ForwardBackwardInput(Wire):
    data: Annotated[list[JsonDatum], Field(max_length=MAX_DATA, fail_fast=True)]
    loss_fn: Id
    loss_fn_config: Annotated[dict[str, float | str], Field(max_length=MAX_ENTRIES)] | None = None


class ForwardBackwardRequest(Wire):
    forward_backward_input: ForwardBackwardInput
    model_id: Id
    seq_id: SeqId | None = None


class ForwardRequest(Wire):
    forward_input: ForwardBackwardInput
    model_id: Id
    seq_id: SeqId | None = None


class AdamParams(Wire):
    """The official defaults. `grad_clip_norm` 0 clips nothing."""

    learning_rate: Rate = 1e-4
    beta1: Unit = 0.9
    beta2: Unit = 0.95
    eps: Annotated[float, Field(gt=0, le=MAX_RATE)] = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=MAX_NORM)] = 0.0


class OptimStepRequest(Wire):
    """New clients send the settings of any optimizer but Adam as `optimizer_params`."""

    adam_params: AdamParams
    model_id: Id
    seq_id: SeqId | None = None

    @model_validator(mode="before")
    @classmethod
    def _adam(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("optimizer_params") is not None:
            raise ValueError("this server steps with AdamW only. Send adam_params instead of optimizer_params.")
        return body


class ReverseKLDatum(Wire):
    """`target_tokens` are an answer, with a weight for each, that follows the student's prompt as well as the
    reference's."""

    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    weights: TensorData


class ReverseKLRequest(Wire):
    """The reference is the weights at a path, or a base. MinT's client sends no `seq_id`."""

    model_id: Id
    reference_model_path: TinkerPath
    data: Annotated[list[ReverseKLDatum], Field(min_length=1, max_length=MAX_DATA, fail_fast=True)]
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] = 1.0
    seq_id: SeqId | None = None


# Sampling


class CreateSamplingSessionRequest(Wire):
    session_id: SessionId
    sampling_session_seq_id: Slot
    base_model: Id | None = None
    model_path: TinkerPath | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("say what to sample from: base_model or model_path")
        return self


class JoinSamplingSessionRequest(Wire):
    sampling_session_id: Id


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopText], Field(max_length=MAX_ENTRIES)] | Annotated[list[Token], Field(max_length=MAX_ENTRIES)]


class SamplingParams(Wire):
    """`stop` adds to the model's own end tokens; [] turns these off. `top_k` -1 and `top_p` 1 leave all tokens in."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("temperature")
    @classmethod
    def _finite_logits(cls, temperature: float) -> float:
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(f"below {MIN_TEMPERATURE} logits overflow. Say 0 to take the likeliest token.")
        return temperature

    @field_validator("top_k")
    @classmethod
    def _some(cls, k: int) -> int:
        if k == 0:
            raise ValueError("0 leaves no token to draw. Say -1 for no limit.")
        return k


class SampleRequest(Wire):
    """From a sampler (`sampling_session_id`; a repeated `seq_id` is the same request), or straight from `model_path` or
    `base_model`. `target_prompt_logprobs` is int64 [prompt - 1, K]; -1 asks for nothing."""

    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams()
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    base_model: Id | None = None
    model_path: TinkerPath | None = None
    sampling_session_id: Id | None = None
    seq_id: Annotated[int, Field(ge=0, le=INT64)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=INT32)] | None = None
    record_stability_info: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.sampling_session_id is None and self.base_model is None and self.model_path is None:
            raise ValueError("say what to sample from: sampling_session_id, model_path or base_model")
        return self
