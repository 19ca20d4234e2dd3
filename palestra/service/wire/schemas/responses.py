"""JSON response bodies for three generations of official clients.

Fields that clients do not need are null. Results of gradients and samples are encoded in `codec.py`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from palestra.service.wire.schemas.requests import OptimizerConfig
from palestra.service.wire.schemas.weights import CheckpointSearchCursor
from palestra.service.wire.schemas.wire_model import WireModel

# Bootstrap, sessions, telemetry


class ClientConfigResponse(WireModel):
    """Feature flags for the clients. The defaults are the clients' own, except for chunks: sent one after the other,
    they arrive in order."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    parallel_fwdbwd_chunks: bool = False
    proto_write_fwdbwd: bool = False
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True


class ClientDynamicConfigResponse(WireModel):
    """Feature flags that clients refresh while they run."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False


class AuthTokenResponse(WireModel):
    """A short-lived token that replaces the API key."""

    jwt: str


class HealthResponse(WireModel):
    """Reply of the health check."""

    status: Literal["ok"] = "ok"


class CreateSessionResponse(WireModel):
    """The new session's id."""

    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class SessionHeartbeatResponse(WireModel):
    """Acknowledges a heartbeat."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class GetSessionResponse(WireModel):
    """The models and samplers of a session."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(WireModel):
    """Session ids, newest first."""

    sessions: list[str]


class TelemetryResponse(WireModel):
    """Acknowledges telemetry."""

    status: Literal["accepted"] = "accepted"


class SupportedModel(WireModel):
    """A base model that the server offers."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class GetServerCapabilitiesResponse(WireModel):
    """The base models that the server offers. `server` identifies palestra to its own client, which then uses
    extensions."""

    server: str = "palestra"
    supported_models: list[SupportedModel]


# Futures


class UntypedAPIFuture(WireModel):
    """Reply to every long call. New clients require `sample_sequence_ids` for a sampling call: one for each sample."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class TryAgainResponse(WireModel):
    """The request is not finished. The queue fields are those of MinT."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None
    status: str | None = None
    queue_depth: int | None = None
    queue_position: int | None = None
    estimated_wait_s: float | None = None
    progress: float | None = None
    retry_after_s: float | None = None


class FutureCompletion(WireModel):
    """One finished request of a batch poll."""

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FuturesRetrieveResponse(WireModel):
    """Requests that finished after the previous cursor."""

    completions: list[FutureCompletion]
    cursor: int


# Models


class ModelData(WireModel):
    """Architecture, name and tokenizer of a model's base."""

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(WireModel):
    """Metadata of a model."""

    type: Literal["get_info"] = "get_info"
    model_data: ModelData
    model_id: str
    optimizer_config: OptimizerConfig = OptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


# Weights


class WeightsInfoResponse(WireModel):
    """Base model and adapter settings of a checkpoint."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CopyWeightsResponse(WireModel):
    """Path of the copy."""

    tinker_path: str


class Checkpoint(WireModel):
    """Metadata of a checkpoint. `checkpoint_id` is the last part of its path: `weights/<name>`."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    base_model: str | None = None


class Cursor(WireModel):
    """Position of a page in a list."""

    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(WireModel):
    """A list of checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class CheckpointSearchResponse(WireModel):
    """A page of checkpoints, newest first. `next_cursor` null: there are no more."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None


class ExternalWeightsUrlsResponse(WireModel):
    """Signed download URLs by file name, valid until `expires`."""

    urls: dict[str, str]
    expires: datetime


class ExternalWeightsUploadStartResponse(WireModel):
    """Signed URLs by file name, to which the files are sent by PUT, valid until `expires`."""

    upload_id: str
    urls: dict[str, str]
    expires: datetime


class ExternalWeightsUploadFinishResponse(WireModel):
    """Path of the checkpoint that holds the uploaded weights."""

    tinker_path: str


class TrainingRun(WireModel):
    """A trained model with its latest checkpoints."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(WireModel):
    """A page of training runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor


# Sampling


class CreateSamplingSessionResponse(WireModel):
    """The new sampler's id."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionResponse(WireModel):
    """The number of a copy of a sampling client."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(WireModel):
    """Base model and weights of a sampler."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
