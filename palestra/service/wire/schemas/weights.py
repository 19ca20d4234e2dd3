"""JSON request bodies for saving, loading, copying and mixing weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from palestra.service.wire.schemas.requests import (
    MAX_ENTRIES,
    CheckpointName,
    Finite,
    Id,
    LoraConfig,
    Metadata,
    NumberedRequest,
    OptimizerConfig,
    SeqId,
    SessionId,
    Slot,
    TinkerPathText,
    Ttl,
)
from palestra.service.wire.schemas.wire_model import WireModel

MANIFEST = "manifest.json"


class SaveWeightsRequest(NumberedRequest):
    """Body of `/save_weights`: a checkpoint with optimizer state."""

    path: CheckpointName | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(NumberedRequest):
    """Body of `/save_weights_for_sampler`. `path` names a checkpoint that is kept; `sampling_session_seq_id` creates a
    sampler whose weights have no path."""

    path: CheckpointName | None = None
    sampling_session_seq_id: Slot | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path (a checkpoint with a name) or sampling_session_seq_id (a sampler)")
        return self


class SaveWeightsExternalRequest(NumberedRequest):
    """Body of `/save_weights_external`."""

    path: CheckpointName
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None


class ExternalWeightsUploadStartRequest(WireModel):
    """Body of `/external_weights_upload_start`: the base and adapter settings of the weights to come."""

    base_model: Id
    lora_config: LoraConfig
    destination_project_id: Id | None = None


class ExternalWeightsUploadFinishRequest(WireModel):
    """Body of `/external_weights_upload_finish`."""

    upload_id: Id


class LoadWeightsRequest(WireModel):
    """Body of `/load_weights`: loads into an existing model (`model_id`), or creates the model from the checkpoint
    (`session_id` and `model_seq_id`)."""

    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: SessionId | None = None
    model_seq_id: Slot | None = None
    base_model: Id | None = None
    user_metadata: Metadata | None = None
    path: TinkerPathText
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.model_id is not None and self.session_id is not None:
            raise ValueError("give either model_id or session_id with model_seq_id, not both")
        if self.model_id is None and (self.session_id is None or self.model_seq_id is None):
            raise ValueError("name the model to load into: model_id, or session_id and model_seq_id")
        return self


class WeightsInfoRequest(WireModel):
    """Body of `/weights_info`."""

    tinker_path: TinkerPathText


class CopyWeightsRequest(WireModel):
    """Body of `/copy_weights`."""

    source_path: TinkerPathText
    session_id: SessionId | None = None
    model_seq_id: Slot | None = None
    destination_project_id: Id | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: str | None = None


class SearchOwner(WireModel):
    """Whose checkpoints are searched. A key may list its own only, so that "accessible" and "own" are the same."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        if self.type == "user" or self.owner_urns:
            raise ValueError('users have no URN here, and a key lists its own checkpoints only: send {"type": "own"}')
        return self


class CheckpointSearchCursor(WireModel):
    """The last checkpoint of a page, after which the next one starts. The uuid is the checkpoint's path here."""

    last_created_at: AwareDatetime
    last_checkpoint_uuid: TinkerPathText


class CheckpointSearchRequest(WireModel):
    """Body of `/checkpoints/search`. Every filter must hold; null matches everything, an empty list nothing."""

    project_ids: Annotated[list[Id], Field(max_length=MAX_ENTRIES)] | None = None
    user_metadata: Annotated[dict[str, str], Field(max_length=MAX_ENTRIES)] = {}
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = SearchOwner()
    base_models: Annotated[list[Id], Field(max_length=MAX_ENTRIES)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: CheckpointSearchCursor | None = None


class TtlRequest(WireModel):
    """Body that sets a checkpoint's time to live in seconds; null means no limit."""

    ttl_seconds: Ttl | None = None


class InterpolateRequest(WireModel):
    """Body of MinT's checkpoint interpolation: one coefficient for each source path."""

    source_paths: Annotated[list[TinkerPathText], Field(min_length=1, max_length=MAX_ENTRIES)]
    coefficients: Annotated[list[Finite], Field(min_length=1, max_length=MAX_ENTRIES)]
    output_path: TinkerPathText | None = None
    output_checkpoint_type: Literal["sampler"] = "sampler"

    @model_validator(mode="after")
    def _check_paired(self) -> Self:
        if len(self.source_paths) != len(self.coefficients):
            raise ValueError(f"{len(self.source_paths)} source_paths but {len(self.coefficients)} coefficients")
        return self
