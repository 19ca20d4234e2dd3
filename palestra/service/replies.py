"""What the server answers: the JSON bodies that the three generations of official clients read.

Fields a client does without are null. Results of gradients and samples are built in `codec.py`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from palestra.service.wire import OptimizerConfig, Wire

# Bootstrap, sessions, telemetry


class ClientConfigResponse(Wire):
    """Flags the clients obey. The defaults are the clients' own, but for chunks: sent one after the other they arrive
    in order."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    parallel_fwdbwd_chunks: bool = False
    proto_write_fwdbwd: bool = False
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True


class ClientDynamicConfigResponse(Wire):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False


class AuthTokenResponse(Wire):
    jwt: str


class HealthResponse(Wire):
    status: Literal["ok"] = "ok"


class CreateSessionResponse(Wire):
    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class SessionHeartbeatResponse(Wire):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class GetSessionResponse(Wire):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Wire):
    sessions: list[str]


class SessionSummary(Wire):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: dict[str, Any] | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchCursor(Wire):
    last_created_at: datetime
    last_session_id: str


class SessionSearchResponse(Wire):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


class TelemetryResponse(Wire):
    status: Literal["accepted"] = "accepted"


class SupportedModel(Wire):
    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


class GetServerCapabilitiesResponse(Wire):
    """`server` tells our own client that it may ask for what is ours alone."""

    server: str = "palestra"
    supported_models: list[SupportedModel]


# Futures


class UntypedAPIFuture(Wire):
    """The answer to every long call. New clients demand `sample_sequence_ids`, one for each sample, of a sampling
    call."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class TryAgainResponse(Wire):
    """Not yet done. The queue's figures are MinT's."""

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


class RequestFailedResponse(Wire):
    error: str
    category: Literal["user", "server", "unknown"]


class FutureCompletion(Wire):
    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class FuturesRetrieveResponse(Wire):
    completions: list[FutureCompletion]
    cursor: int


# Models


class ModelData(Wire):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Wire):
    type: Literal["get_info"] = "get_info"
    model_data: ModelData
    model_id: str
    optimizer_config: OptimizerConfig = OptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


# Weights


class WeightsInfoResponse(Wire):
    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CopyWeightsResponse(Wire):
    tinker_path: str


class Checkpoint(Wire):
    """`checkpoint_id` is the tail of its path: `weights/<name>`."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class Cursor(Wire):
    offset: int
    limit: int
    total_count: int


class CheckpointsListResponse(Wire):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class ExternalWeightsUrlsResponse(Wire):
    urls: dict[str, str]
    expires: datetime


class TrainingRun(Wire):
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


class TrainingRunsResponse(Wire):
    training_runs: list[TrainingRun]
    cursor: Cursor


# Sampling


class CreateSamplingSessionResponse(Wire):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionResponse(Wire):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerResponse(Wire):
    sampler_id: str
    base_model: str
    model_path: str | None = None
