"""The JSON bodies about weights: saving, loading, copying and mixing them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from palestra.service.wire import (
    MAX_ENTRIES,
    CheckpointName,
    Finite,
    Id,
    Metadata,
    OptimizerConfig,
    SeqId,
    SessionId,
    Slot,
    TinkerPath,
    Ttl,
    Wire,
)


class SaveWeightsRequest(Wire):
    model_id: Id
    path: CheckpointName | None = None
    seq_id: SeqId | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(Wire):
    """A `path` names a checkpoint that stays; `sampling_session_seq_id` makes a sampler whose weights have no name."""

    model_id: Id
    path: CheckpointName | None = None
    sampling_session_seq_id: Slot | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: SeqId | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("say either path (a checkpoint with a name) or sampling_session_seq_id (a sampler)")
        return self


class SaveWeightsExternalRequest(Wire):
    model_id: Id
    path: CheckpointName
    seq_id: SeqId | None = None
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None


class LoadWeightsRequest(Wire):
    """Into a model that is there (`model_id`), or as the first request of one that the checkpoint shapes
    (`session_id` and `model_seq_id`)."""

    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: SessionId | None = None
    model_seq_id: Slot | None = None
    base_model: Id | None = None
    user_metadata: Metadata | None = None
    path: TinkerPath
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.model_id is not None and self.session_id is not None:
            raise ValueError("say either model_id or session_id with model_seq_id, not both")
        if self.model_id is None and (self.session_id is None or self.model_seq_id is None):
            raise ValueError("say which model to load into: model_id, or session_id and model_seq_id")
        return self


class WeightsInfoRequest(Wire):
    tinker_path: TinkerPath


class CopyWeightsRequest(Wire):
    source_path: TinkerPath
    session_id: SessionId | None = None
    model_seq_id: Slot | None = None
    destination_project_id: Id | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: str | None = None


class TtlRequest(Wire):
    """null: for ever."""

    ttl_seconds: Ttl | None = None


class InterpolateRequest(Wire):
    source_paths: Annotated[list[TinkerPath], Field(min_length=1, max_length=MAX_ENTRIES)]
    coefficients: Annotated[list[Finite], Field(min_length=1, max_length=MAX_ENTRIES)]
    output_path: TinkerPath | None = None
    output_checkpoint_type: Literal["sampler"] = "sampler"

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if len(self.source_paths) != len(self.coefficients):
            raise ValueError(f"{len(self.source_paths)} source_paths but {len(self.coefficients)} coefficients")
        return self
