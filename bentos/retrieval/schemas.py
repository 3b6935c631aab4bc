"""What clients send and get. Integers are strict (no booleans, no strings) and unknown fields are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bentos.retrieval.runtime import RankBy

MAX_K = 2000
MAX_EXPLAINED = 100
MAX_HISTORY = 2000
MAX_BLOCKED = 1000
MAX_ELIGIBLE = 100_000
MAX_BATCH = 256
MAX_EVENTS = 500

Id = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
TimestampUs = Annotated[int, Field(strict=True, ge=0, le=(2**32 - 1) * 1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class EventIn(_Strict):
    """One engagement: which ad (or the content of an ad), how, where and when."""

    ad_id: Id
    kind: Name
    surface: Name
    timestamp_us: TimestampUs
    event_id: Id | None = None
    """For pushed events: the tail takes an id once. The hash of the content when left out."""


class AttributesIn(_Strict):
    """User-side features by name; those left out have their default (unknown, 0)."""

    categorical: dict[Name, Id] = Field(default_factory=dict, max_length=256)
    dense: dict[Name, Number] = Field(default_factory=dict, max_length=256)


class MaxPerIn(_Strict):
    """Diversity: at most `limit` ads that share a known value of a group of the schema."""

    group: Name
    limit: Annotated[int, Field(strict=True, ge=1, le=MAX_K)]


class RetrieveRequest(_Strict):
    """Which ads for this user, on this surface, now? Give `user_id`, or `history` and `attributes` inline."""

    user_id: Id | None = None
    history: list[EventIn] | None = Field(default=None, max_length=MAX_HISTORY)
    attributes: AttributesIn | None = None
    surface: Name
    k: Annotated[int, Field(strict=True, ge=1, le=MAX_K)] = 10
    tier: Name | None = None
    deadline_ms: Annotated[int, Field(strict=True, ge=1, le=60_000)] = 1000
    blocked_ad_ids: list[Id] = Field(default_factory=list, max_length=MAX_BLOCKED)
    eligible_ad_ids: list[Id] | None = Field(default=None, min_length=1, max_length=MAX_ELIGIBLE)
    """Only these ads may be answered; all may when null. Ads that the release doesn't know are ignored."""
    rank_by: RankBy = "score"
    """`value`: by log(click probability x bid), with the release's bids; ads without one can't be answered."""
    max_per: MaxPerIn | None = None
    request_id: Id | None = None
    """Comes back in the answer and in the request log, where later outcomes are joined by it."""
    timestamp_us: TimestampUs | None = None
    """When the request happens; now unless a log is replayed."""

    @property
    def restricted(self) -> bool:
        """Whether some ads may not be answered, or not all together."""
        return bool(self.blocked_ad_ids) or self.eligible_ad_ids is not None or self.max_per is not None

    @model_validator(mode="after")
    def _one_user(self) -> RetrieveRequest:
        inline = self.history is not None or self.attributes is not None
        if (self.user_id is not None) == inline:
            raise ValueError("user_id: give either user_id or inline history and attributes")
        return self


class RetrieveResponse(BaseModel):
    """Ads in falling order of what they were ranked by, and how they were found."""

    request_id: int
    ad_ids: list[int]
    scores: list[float]
    """What the ads were ranked by: logits, or log(click probability x bid)."""
    release: str
    release_source: str
    """`pointer`: the promoted release; `bento`: the Bento's own copy, because no pointer could be read."""
    tier: str
    stepped_down: bool
    """True when the service chose a cheaper tier than the default because its queue filled up."""
    cost: float
    """FLOPs relative to a full scan."""
    nodes_scored: int
    ads_scored: int
    cold: bool
    """True when nothing is known about the user."""
    feature_age_s: float | None


class ExplainRequest(RetrieveRequest):
    """A retrieve request, to be explained instead of answered."""

    k: Annotated[int, Field(strict=True, ge=1, le=MAX_EXPLAINED)] = 10


class ExplainedAd(BaseModel):
    """An ad of the answer and how the search came to it."""

    ad_id: int
    score: float
    source: Literal["beam", "related"]
    """`beam`: its leaf was visited. `related`: it follows from the history, whatever its leaf."""
    path: list[int]
    """Its node of every level."""


class ValueShare(BaseModel):
    """A code of a group and the share of a node's ads that have it."""

    code: int
    share: float


class VisitedNode(BaseModel):
    """A node that the search visited, and what it holds."""

    place: int
    """0 is the best, by score, or with rank_by `value` by log(click probability x largest bid below)."""
    node: int
    score: float
    num_ads: int
    values: dict[str, list[ValueShare]]
    """By group, most frequent first; ads whose value is unknown have none."""
    representative_ad_id: int
    """The ad nearest to the node's vector."""


class ExplainResponse(BaseModel):
    """What `/retrieve` answers to the same request, and the way there."""

    release: str
    release_source: str
    tier: str
    cost: float
    nodes_scored: int
    ads_scored: int
    cold: bool
    ads: list[ExplainedAd]
    levels: list[list[VisitedNode]]
    """From the root down, the nodes visited, best first."""


class BatchResult(BaseModel):
    """One entry of a batch: an answer, or what was wrong with the request."""

    answer: RetrieveResponse | None = None
    error: str | None = None
    fields: list[dict[str, str]] = Field(default_factory=list)
    status: int = 200


class BatchRequest(_Strict):
    """Requests are checked one by one, so a bad one fails alone; hence the loose type."""

    requests: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_BATCH)


class BatchResponse(BaseModel):
    """Results in the order of the requests."""

    results: list[BatchResult]


class EventsRequest(_Strict):
    """Engagements of one user, as they happen."""

    user_id: Id
    events: list[EventIn] = Field(min_length=1, max_length=MAX_EVENTS)


class EventsResponse(BaseModel):
    """How many events the user's tail took, and how many named an ad that the serving release does not know."""

    accepted: int
    unknown_ads: int


class ReleaseInfo(BaseModel):
    """Which release serves."""

    active: str | None
    source: str | None
    as_of: str | None
    previous: str | None
    versions: list[str]


def error_fields(error: ValidationError) -> list[dict[str, str]]:
    """Name each wrong field of a body and what is wrong with it."""
    return describe_errors(error.errors(include_input=False, include_url=False, include_context=False))


def describe_errors(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Field, message and type of pydantic's error entries; the input is not echoed (it may not even be JSON)."""
    found = []
    for item in errors:
        location = ".".join(str(part) for part in item["loc"] if part != "body")
        message = str(item["msg"]).removeprefix("Value error, ")
        if not location and ": " in message and item["type"] == "value_error":
            location, message = message.split(": ", 1)
        if item["type"] == "json_invalid":
            location = "body"
        found.append({"field": location or "body", "error": message, "type": str(item["type"])})
    return found
