"""What crosses the border between an engine's scheduler process and its controller.

Small frozen dataclasses of raw values, shared by both sides and importing nothing of ours. An engine reports counts;
every verdict on them (`KvEvidence.is_empty`) is made here, on the reader's side, in one place.

    /server_info  -> internal_states[i]["reef_slime"]        SchedulerReport, one per data-parallel rank
    /reef_slime/reports  -> a list of these, and nothing else
    /generate     <- sampling_params.custom_params["kv_anchors"]   prompt positions where other prompts will diverge
                  -> meta_info["weight_versions"]            list of Span over output tokens (who sampled)
                     meta_info["kv_provenance"]              list of KvSegment over output tokens (under which KV)
                     meta_info["prefills"]                   list of Prefill (what each admission reused and computed)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

REPORTS_PATH = "/reef_slime/reports"
REPORT_KEY = "reef_slime"
KV_PROVENANCE_KEY = "kv_provenance"
PREFILLS_KEY = "prefills"
SAMPLED_SPANS_KEY = "weight_versions"
ANCHORS_KEY = "kv_anchors"
ANCHORS_HOOK = "swa_anchors"  # the hook that reads it
SWITCH_KEY = "reef_slime_hooks"  # of /set_internal_state, for the hook hook_switch
HOOKS_VARIABLE = "REEF_SLIME_HOOKS"  # comma-separated hook names; a process without it is left untouched

ACTIVE = "active"
FAILED = "failed in "  # how the status of a hook begins whose code raised
NOT_NEEDED = "not needed"  # this SGLang already does what the hook would add; as good as active

T = TypeVar("T")


class WireError(ValueError):
    """A report does not have the form of the wire contract."""


def _build(cls: type[T], data: Any) -> T:
    """Build the dataclass `cls` from a JSON object; unknown keys are ignored, missing ones named."""
    if not isinstance(data, Mapping):
        raise WireError(f"{cls.__name__}: expected an object, got {type(data).__name__}")
    names = _field_names(cls)  # type: ignore[arg-type]
    try:
        return cls(*[data[n] for n in names])
    except KeyError:
        missing = [n for n in names if n not in data]
        raise WireError(f"{cls.__name__}: the engine's report lacks {', '.join(missing)}") from None


def _flat(value: KvEvidence | Loads) -> dict[str, Any]:
    """Its plain values as JSON."""
    return {name: getattr(value, name) for name in _field_names(value.__class__)}  # type: ignore[arg-type]


@cache  # a fleet's reports are read while its engines are paused
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


@dataclass(frozen=True, slots=True)
class KvEvidence:
    """What one scheduler counted itself. Units are tokens (KV slots) unless a name says otherwise.

    SWA fields are 0 on a model without sliding-window layers, mamba fields on one without linear-attention layers.
    Capacities are what was free when the scheduler had built its cache and no request had come.
    """

    flush_epoch: int  # flushes that this scheduler carried out since it started
    flush_refused: int
    last_refusal: dict[str, Any] | None  # the counts that made it refuse
    paused: bool
    pauses: int  # pauses carried out since start
    pause_mode: str | None  # of the current pause, None while running
    in_flight_at_pause: int  # requests that the scheduler knew when the last pause arrived
    retracted_at_pause: int  # of these, requests whose KV the pause took away
    tokens_at_pause: int  # KV tokens that the retracted requests held, so must prefill again
    swept_epoch: int | None  # the epoch that began with the last sweep; None without a sweep, or the hook `scope`
    swept_tokens: int  # entries of older epochs evicted since start, at sweeps and when their last request ended
    tree_full_evictable: int
    tree_full_protected: int
    tree_swa_evictable: int
    tree_swa_protected: int
    full_free: int
    full_capacity: int
    swa_free: int
    swa_capacity: int
    request_rows_free: int
    request_rows_capacity: int
    requests_holding_kv: int
    waiting: int
    running: int
    chunked: int  # 1 while a chunked prefill is under way
    result_queue: int
    forward_passes: int  # batches that this scheduler launched since it started, idle and health-check batches included
    device_waits: int  # epochs that began once the device had finished all that was launched
    device_waits_failed: int  # weights that were about to change while that couldn't be waited for
    image_features: int  # entries of the cache of image features; -1 for a multimodal model whose cache wasn't found
    grammar_queue: int  # requests that wait for their grammar; they hold no KV
    tree: str  # class of the prefix cache, then "+name" for each of its parts that these counts don't cover
    tree_mamba_evictable: int  # states of linear-attention layers, as all mamba counts
    tree_mamba_protected: int
    mamba_free: int
    mamba_capacity: int

    @classmethod
    def from_json(cls, data: Any) -> KvEvidence:
        return _build(cls, data)

    def leftovers(self) -> tuple[str, ...]:
        """Every count that differs from an empty cache, as "name=value". Waiting requests may wait, without KV."""
        expected_zero = (
            "tree_full_evictable",
            "tree_full_protected",
            "tree_swa_evictable",
            "tree_swa_protected",
            "tree_mamba_evictable",
            "tree_mamba_protected",
            "requests_holding_kv",
            "running",
            "chunked",
            "result_queue",
        )
        found = [f"{name}={getattr(self, name)}" for name in expected_zero if getattr(self, name) != 0]
        for free, capacity in (
            ("full_free", "full_capacity"),
            ("swa_free", "swa_capacity"),
            ("mamba_free", "mamba_capacity"),
            ("request_rows_free", "request_rows_capacity"),
        ):
            if getattr(self, free) != getattr(self, capacity):
                found.append(f"{free}={getattr(self, free)} of {getattr(self, capacity)}")
        return tuple(found)

    @property
    def only_grammars_wait(self) -> bool:
        """Whether requests that wait for their grammars are all that an idle test before a flush would find."""
        at_work = self.requests_holding_kv or self.running or self.chunked or self.result_queue
        return self.grammar_queue > 0 and not at_work

    @property
    def is_empty(self) -> bool:
        """True when no KV of any request or cache entry is left in this scheduler."""
        return not self.leftovers()


@dataclass(frozen=True, slots=True)
class Loads:
    """Updates of weights that one scheduler process carried out since its start.

    By its own outcome alone; on the rank that answers, failed where any rank that it answers for failed.
    """

    done: int
    failed: int
    last_failure: str | None
    last_failed: bool  # whether the last one failed: a sender may send again what failed at first

    @classmethod
    def from_json(cls, data: Any) -> Loads:
        return _build(cls, data)


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """One scheduler process as it describes itself: tensor rank 0 of a data-parallel rank, with the ranks behind it."""

    instance_id: str  # new at every process start, so a restart between two reads shows
    hooks: dict[str, str]  # hook name -> "active", "not needed", or why it is neither
    epoch: int  # weight mutations since start
    kv: KvEvidence
    loads: Loads = Loads(0, 0, None, False)
    tensor_rank: int = 0
    tensor_size: int = 1
    tensor_ranks: tuple[SchedulerReport, ...] = ()  # the other tensor ranks that this one answers for
    missing_ranks: dict[str, str] = field(default_factory=dict)  # those that left no report -> why

    @classmethod
    def from_json(cls, data: Any) -> SchedulerReport:
        if isinstance(data, Mapping) and "error" in data:  # the scheduler goes on, and can't count
            raise WireError(f"{cls.__name__}: the scheduler made none: {data['error']}")
        built = _build(cls, data)
        for name, kind in (("hooks", dict), ("missing_ranks", dict), ("tensor_ranks", list | tuple)):
            if not isinstance(getattr(built, name), kind):
                raise WireError(f"SchedulerReport: {name} is {getattr(built, name)!r}")
        return replace(
            built,
            kv=KvEvidence.from_json(built.kv),
            loads=Loads.from_json(built.loads),
            tensor_ranks=tuple(cls.from_json(rank) for rank in built.tensor_ranks),
        )

    @property
    def ranks(self) -> tuple[SchedulerReport, ...]:
        """Every tensor rank that reports, this one first."""
        return (self, *self.tensor_ranks)

    def to_json(self) -> dict[str, Any]:
        """Written out, not by `asdict`: engines are paused while this is made."""
        data = {name: getattr(self, name) for name in _field_names(SchedulerReport)}
        nested = {"kv": _flat(self.kv), "loads": _flat(self.loads)}
        return {**data, **nested, "tensor_ranks": [rank.to_json() for rank in self.tensor_ranks]}

    def missing_hooks(self, needed: Sequence[str]) -> dict[str, str]:
        """Needed hook -> why it is not active, unless this SGLang does without it."""
        found = {name: self.hooks.get(name, "not loaded") for name in needed}
        return {name: status for name, status in found.items() if status not in (ACTIVE, NOT_NEEDED)}

    @property
    def failed_hooks(self) -> dict[str, str]:
        """Hooks whose code raised, with what and where: what they would have seen, or done, is missing since."""
        return {name: status for name, status in self.hooks.items() if status.startswith(FAILED)}


@dataclass(frozen=True, slots=True)
class Span:
    """Positions start..end (end excluded) that belong to one weight version."""

    version: str
    start: int
    end: int

    @classmethod
    def from_json(cls, data: Any) -> Span:
        return _build(cls, data)

    def to_json(self) -> dict[str, Any]:
        """Written out by hand, as in the classes below: `asdict` takes thirty times as long, once per request."""
        return {"version": self.version, "start": self.start, "end": self.end}


@dataclass(frozen=True, slots=True)
class KvSegment:
    """Output tokens start..end, the version that sampled them, and the KV that they were sampled from.

    `context` covers prompt + output positions 0 .. prompt_length + end - 1, end excluded: the KV of a segment's last
    token is computed with the next token. Its spans say which version computed the KV of each position. A retract
    replaces the context of the tokens that follow it, an in-place publication splits it; both leave earlier segments
    as they were.

    `context` is what follows from the order of events; `measured`: each position's slot was found to have been written
    by the version that `context` names, or else `measured_context` is what was found (hook kv_stamps).
    """

    start: int
    end: int
    version: str
    context: tuple[Span, ...]
    measured: bool = False
    measured_context: tuple[Span, ...] = ()

    @property
    def contradicted(self) -> bool:
        """Whether the KV was written by other weights than is claimed."""
        return bool(self.measured_context)

    @classmethod
    def from_json(cls, data: Any) -> KvSegment:
        """Records of an engine without stamps, and of earlier versions, have nothing measured."""
        built = _build(cls, {**_UNMEASURED, **data} if isinstance(data, Mapping) else data)
        found = tuple(Span.from_json(s) for s in built.measured_context or ())
        context = tuple(Span.from_json(s) for s in built.context)
        return cls(built.start, built.end, built.version, context, bool(built.measured), found)

    def to_json(self) -> dict[str, Any]:
        context = [span.to_json() for span in self.context]
        data: dict[str, Any] = {"start": self.start, "end": self.end, "version": self.version, "context": context}
        if self.measured:
            data["measured"] = True
        if self.measured_context:
            data["measured_context"] = [span.to_json() for span in self.measured_context]
        return data


_UNMEASURED = {"measured": False, "measured_context": ()}


@dataclass(frozen=True, slots=True)
class Prefill:
    """One admission of a request to prefill; a retracted request has several.

    `order` counts the admissions of this scheduler inside its current weight epoch: 0 is the first after a
    publication, the one that must find no cached token.
    """

    epoch: int
    order: int
    version: str
    cached: int  # tokens found in the radix cache
    total: int  # tokens of prompt and earlier output at that moment

    @classmethod
    def from_json(cls, data: Any) -> Prefill:
        return _build(cls, data)

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "order": self.order,
            "version": self.version,
            "cached": self.cached,
            "total": self.total,
        }
