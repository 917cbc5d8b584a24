"""This section configures how new weights are published."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from slime_backend.config.section import Section
from slime_backend.fleet.weights import VerifyWeights
from slime_backend.planner.at_start import AUTO
from slime_backend.policy import Layout, Policy, PrefixSharing, decide


class PublicationConfig(Section):
    """The policy follows from these settings; they also choose the transport and how many versions are kept."""

    layout: Layout = "disjoint"
    disjoint_prefix_sharing: PrefixSharing = "off"
    transport: Literal["disk", "distributed"] = "disk"
    verify_weights: VerifyWeights = Field(
        "auto", description="engines' weights by content, between load and label: auto, full, sample or off"
    )
    keep_versions: int | None = Field(
        None, ge=2, description="checkpoints of older versions are removed once nothing needs them; none: all are kept"
    )

    @field_validator("disjoint_prefix_sharing", mode="before")
    @classmethod
    def _known(cls, word: Any) -> Any:
        """Check the mode. A user may write `auto`; `make_config` replaces it before this is called."""
        known = [*get_args(PrefixSharing), AUTO]
        if word not in known:
            raise ValueError(f"Input should be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
        return word

    @model_validator(mode="after")
    def _possible(self) -> PublicationConfig:
        decide(self.layout, self.disjoint_prefix_sharing)  # raises PolicyError, a ValueError
        if self.layout == "colocated":
            raise ValueError(
                "layout=colocated needs a trainer that shares GPUs with the engines (slime); "
                "the local trainer is disjoint"
            )
        return self

    @property
    def policy(self) -> Policy:
        return decide(self.layout, self.disjoint_prefix_sharing)
