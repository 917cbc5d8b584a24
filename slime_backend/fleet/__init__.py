"""The engines that are published to: membership, admission, dispatch of requests, liveness, the doctor."""

from slime_backend.fleet.membership import EngineUnfit, Fleet, FleetError, Member, VersionTaken, admit, readmit_retired

__all__ = ["EngineUnfit", "Fleet", "FleetError", "Member", "VersionTaken", "admit", "readmit_retired"]
