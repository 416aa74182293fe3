"""The JSON of Files and Batches: https://platform.openai.com/docs/api-reference/files and …/batch."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from ferrule.schema import Body, Int, rule
from ferrule_plugins.router.batches.store import BatchRecord, FileRecord
from ferrule_plugins.router.batches.usage import Tokens

T = TypeVar("T")

Label = Annotated[str, Field(max_length=64)]
LabelValue = Annotated[str, Field(max_length=512)]


class FileObject(BaseModel):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, record: FileRecord) -> FileObject:
        return cls(
            id=record.id,
            bytes=record.bytes,
            created_at=record.created_at,
            expires_at=record.expires,
            filename=record.filename,
            purpose=record.purpose,
        )


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Page(BaseModel, Generic[T]):
    """A part of a list. The next part begins after `last_id`."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[Int, Field(ge=3600, le=30 * 86_400)]


class BatchBody(Body):
    """A batch to run."""

    input_file_id: Annotated[str, Field(description="A file that was uploaded with the purpose batch.")]
    endpoint: Annotated[str, Field(description="The route of all its requests, such as /v1/chat/completions.")]
    completion_window: Annotated[
        str,
        rule("must be a number of hours or days, such as 24h or 7d"),
        Field(
            pattern="^[1-9][0-9]{0,2}[hd]$",
            description="Hours or days after which lines that were not answered are given up: OpenAI's 24h, or another "
            "number up to the age at which files are removed.",
        ),
    ]
    metadata: Annotated[
        dict[Label, LabelValue] | None, Field(max_length=16, description="Up to 16 pairs that the batch shows.")
    ] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Field(description="When its output files are removed, counted from their creation.")
    ] = None


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchFault(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchFault]


class BatchInputDetails(BaseModel):
    cached_tokens: int


class BatchOutputDetails(BaseModel):
    reasoning_tokens: int


class BatchUsage(BaseModel):
    """The tokens of all answers of a batch."""

    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int

    @classmethod
    def of(cls, tokens: Tokens) -> BatchUsage:
        return cls(
            input_tokens=tokens.input,
            input_tokens_details=BatchInputDetails(cached_tokens=tokens.cached),
            output_tokens=tokens.output,
            output_tokens_details=BatchOutputDetails(reasoning_tokens=tokens.reasoning),
            total_tokens=tokens.input + tokens.output,
        )


class BatchObject(BaseModel):
    """A batch. Times are in seconds since 1970, null as long as that has not happened."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> BatchObject:
        own = {"errors", "created_at", "expires_at", "request_counts", "usage", "object"}
        fields: dict[str, Any] = {name: getattr(record, name) for name in cls.model_fields if name not in own}
        faults = [BatchFault(code=f.code, message=f.message, param=f.param, line=f.line) for f in record.errors]
        return cls(
            **fields,
            errors=BatchFaults(data=faults) if faults else None,
            created_at=record.created_at,
            expires_at=record.expires,
            request_counts=RequestCounts(total=record.total, completed=record.completed, failed=record.failed),
            usage=BatchUsage.of(record.tokens) if record.tokens else None,
        )
