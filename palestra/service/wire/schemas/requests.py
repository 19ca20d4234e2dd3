"""JSON request bodies of the training wire, in the dialects of three generations of official clients.

Fields with a default may be missing, and `type` tags are never required. Fields that this server does not define are
refused by name unless they have no value, and those it defines are checked: types, and ranges beyond which a server
would fail. Bodies for weights and OpenAI's API are in `weights.py` and `openai.py`, replies in `responses.py`.
`codec.py` decodes arrays; `validation.py` validates them against a base model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from palestra.service.wire.schemas.wire_model import WireModel

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_UINT64 = 2**64 - 1
MAX_EXACT_INT = 2**53  # integers below this survive JSON readers that parse all numbers as floats
MAX_ID_CHARS = 256  # characters of a name or an id
MAX_CHAT_CHARS = 4_000_000  # characters of one chat message or prompt
MAX_ENTRIES = 1024  # of a list or mapping of small items: tags, metadata, paths, stops
MAX_SEQUENCES = 65_536  # sequences in one training call
MAX_RANK = 512
MAX_SAMPLES = 4096
MAX_NEW_TOKENS = 1_048_576
MAX_TOPK = 256
MAX_TEMPERATURE = 1000.0
MIN_TEMPERATURE = 1e-5  # logits divided by less may overflow float32; vLLM also treats less as 0
MAX_RATE = 1e4  # of learning rate and weight decay
MAX_CLIP_NORM = 1e30  # largest clipping norm: float32, with room for sums
MAX_PROMPTS = 1024  # in one call for completions
MAX_TTL_S = 3660 * 86_400  # seconds: ten years, the official limit


Id = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=MAX_ID_CHARS)]  # databases reject NUL
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
CheckpointName = Annotated[str, Field(pattern=r"^[.-]*[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)]
TinkerPathText = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4 * MAX_ID_CHARS)]
Metadata = Annotated[dict[str, Any], Field(max_length=MAX_ENTRIES)]
Slot = Annotated[int, Field(ge=0, le=MAX_INT32)]  # a model's or sampler's number within its session
SeqId = Annotated[int, Field(ge=0, le=MAX_INT32)]  # of a training request; 32 bits in the protobuf
Seed = Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_UINT64)]  # 64 bits, signed or unsigned
Ttl = Annotated[int, Field(ge=1, le=MAX_TTL_S)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE)]
Token = Annotated[int, Field(ge=0, le=MAX_INT32)]
# fail_fast: reports only the first of many invalid numbers
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Numbers = Annotated[list[float], Field(fail_fast=True)]
Integers = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT64)]], Field(fail_fast=True)]


# Bootstrap, sessions, telemetry


class CreateSessionRequest(WireModel):
    """Body of `/create_session`."""

    tags: Annotated[list[str], Field(max_length=MAX_ENTRIES)] = []
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: Id | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(WireModel):
    """Body of `/session_heartbeat`."""

    session_id: SessionId


class FinishReason(WireModel):
    """Outcome of a session."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSessionRequest(WireModel):
    """Body that finishes a session."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


# Futures


class FutureRetrieveRequest(WireModel):
    """Body of `/retrieve_future`."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFutureRequest(WireModel):
    """Body of `/cancel_future`."""

    request_id: Id


class SamplingSessionTarget(WireModel):
    """The sampler, and the copy of its client, whose samples are retrieved."""

    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, le=MAX_INT64)] = 0


class FuturesRetrieveRequest(WireModel):
    """Body of `/retrieve_futures`: a batch poll."""

    target: SamplingSessionTarget
    prev_cursor: Annotated[int, Field(ge=0, le=MAX_INT64)] = 0
    timeout: NotNegative | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=MAX_SEQUENCES)] = []


# Models


class LoraConfig(WireModel):
    """Adapter settings of a model: which linear layers of the base it covers, and its scale.

    `seed` null derives the seed from the model's id. `alpha` is an extension: official adapters have 32, whatever their
    rank.
    """

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 32
    alpha: Annotated[float, Field(gt=0, le=MAX_EXACT_INT)] = 32.0
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(WireModel):
    """The optimizer of a model: AdamW only."""

    type: str = "adamw"

    @field_validator("type")
    @classmethod
    def _adamw(cls, name: str) -> str:
        if name != "adamw":
            raise ValueError(f'this server has no optimizer "{name[:MAX_ID_CHARS]}". Leave it out, or name "adamw".')
        return name


class CreateModelRequest(WireModel):
    """Body of `/create_model`."""

    session_id: SessionId
    model_seq_id: Slot
    base_model: Id
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    rollout_correction_config: Metadata | None = None


class ModelRequest(WireModel):
    """Body of `/get_info` and `/unload_model`."""

    model_id: Id


class NumberedRequest(ModelRequest):
    """A request of a model, with its place among them."""

    seq_id: SeqId | None = None


# Training


class TensorData(WireModel):
    """A tensor in JSON. `data` is flat; with `sparse_*` it holds the listed cells of a matrix of `shape`, row by row
    (CSR)."""

    data: Numbers
    dtype: Literal["float32", "int64", "int32", "bfloat16"]
    shape: Annotated[Integers, Field(max_length=8)] | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None

    @property
    def is_sparse(self) -> bool:
        """True if only some cells are listed."""
        return self.sparse_crow_indices is not None or self.sparse_col_indices is not None


class Chunk(WireModel):
    """A run of token ids. The oldest clients send no `type`, so only the presence of tokens distinguishes text from
    other chunks."""

    tokens: Tokens

    @model_validator(mode="before")
    @classmethod
    def _text(cls, chunk: Any) -> Any:
        if isinstance(chunk, dict) and chunk.get("tokens") is None:
            kind = str(chunk.get("type", "unknown"))[:MAX_ID_CHARS]
            raise ValueError(f'a chunk of type "{kind}" has no tokens. This server reads text only: send encoded_text.')
        return chunk


class ModelInput(WireModel):
    """A prompt or training sequence as chunks of token ids."""

    chunks: Annotated[list[Chunk], Field(max_length=MAX_SEQUENCES, fail_fast=True)]


class JsonDatum(WireModel):
    """One training sequence and the inputs of its loss."""

    model_input: ModelInput
    loss_fn_inputs: Annotated[dict[str, TensorData], Field(max_length=MAX_ENTRIES)]


class ForwardBackwardInput(WireModel):
    """The data and loss of a training call."""

    data: Annotated[list[JsonDatum], Field(max_length=MAX_SEQUENCES, fail_fast=True)]
    loss_fn: Id
    loss_fn_config: Annotated[dict[str, float | str], Field(max_length=MAX_ENTRIES)] | None = None


class ForwardBackwardRequest(NumberedRequest):
    """Body of `/forward_backward` in JSON."""

    forward_backward_input: ForwardBackwardInput


class ForwardRequest(NumberedRequest):
    """Body of `/forward`."""

    forward_input: ForwardBackwardInput


class AdamParams(WireModel):
    """AdamW settings of one step, with the official defaults. `grad_clip_norm` 0 disables clipping."""

    learning_rate: Rate = 1e-4
    beta1: UnitInterval = 0.9
    beta2: UnitInterval = 0.95
    eps: Annotated[float, Field(gt=0, le=MAX_RATE)] = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=MAX_CLIP_NORM)] = 0.0


class OptimStepRequest(NumberedRequest):
    """Body of `/optim_step`. New clients send the settings of optimizers other than Adam as `optimizer_params`."""

    adam_params: AdamParams

    @model_validator(mode="before")
    @classmethod
    def _adam(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("optimizer_params") is not None:
            raise ValueError("this server steps with AdamW only. Send adam_params instead of optimizer_params.")
        return body


class ReverseKLDatum(WireModel):
    """An answer (`target_tokens`, with one weight each) that follows the student's prompt and also the reference's
    prompt."""

    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    weights: TensorData


class ReverseKLRequest(NumberedRequest):
    """Body of MinT's reverse-KL pass. The reference is a path of weights or a base model. MinT's client sends no
    `seq_id`."""

    reference_model_path: TinkerPathText
    data: Annotated[list[ReverseKLDatum], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] = 1.0


# Sampling


class CreateSamplingSessionRequest(WireModel):
    """Body of `/create_sampling_session`."""

    session_id: SessionId
    sampling_session_seq_id: Slot
    base_model: Id | None = None
    model_path: TinkerPathText | None = None

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("name the model to sample from: base_model or model_path")
        return self


class JoinSamplingSessionRequest(WireModel):
    """Body of `/join_sampling_session`."""

    sampling_session_id: Id


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[StopText], Field(max_length=MAX_ENTRIES)] | Annotated[list[Token], Field(max_length=MAX_ENTRIES)]


class SamplingParams(WireModel):
    """Sampling settings. `stop` adds to the model's own end tokens; [] disables these. `top_k` -1 and `top_p` 1
    restrict nothing."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] = -1
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


class SampleRequest(WireModel):
    """Body of `/asample`: samples from a sampler (`sampling_session_id`; a repeated `seq_id` is the same request), or
    directly from `model_path` or `base_model`. `target_prompt_logprobs` is int64 [prompt - 1, K]; -1 requests nothing.
    """

    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams()
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    base_model: Id | None = None
    model_path: TinkerPathText | None = None
    sampling_session_id: Id | None = None
    seq_id: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MAX_TOPK)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    record_stability_info: bool | None = None

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        if self.sampling_session_id is None and self.base_model is None and self.model_path is None:
            raise ValueError("name the model to sample from: sampling_session_id, model_path or base_model")
        return self


class AssignProjectRequest(WireModel):
    """Body that assigns a session to a project."""

    project_id: Id
