"""Makes the W&B workspace that configs/trackers/wandb_workspace.yaml describes. Needs `wandb login` and the network:

    pip install wandb-workspaces
    python scripts/make_wandb_workspace.py ENTITY

`--check` builds it and saves nothing, without network.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

SPEC = Path(__file__).resolve().parent.parent / "configs" / "trackers" / "wandb_workspace.yaml"


def read_spec(path: Path = SPEC) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(path.read_text())
    return spec


def build(spec: dict[str, Any], entity: str, project: str) -> Any:
    """A wandb_workspaces Workspace, not saved."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(
            name=section["name"],
            is_open=True,
            panels=[
                reports.LinePlot(title=panel["title"], x=section["x"], y=list(panel["metrics"]))
                for panel in section["panels"]
            ],
        )
        for section in spec["sections"]
    ]
    return workspaces.Workspace(entity=entity, project=project, name=spec["name"], sections=sections)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the W&B workspace of configs/trackers/wandb_workspace.yaml.")
    parser.add_argument("entity", help="a W&B user or team")
    parser.add_argument("--project", default="reef-slime", help="the config key wandb_project of the runs")
    parser.add_argument("--check", action="store_true", help="build it without saving; needs no network")
    args = parser.parse_args()
    try:
        workspace = build(read_spec(), args.entity, args.project)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        sys.stderr.write(f"{package} is not installed: pip install wandb-workspaces\n")
        return 1
    if args.check:
        panels = sum(len(section.panels) for section in workspace.sections)
        sys.stdout.write(f"{len(workspace.sections)} sections, {panels} panels; nothing was saved\n")
        return 0
    try:
        workspace.save()
    except Exception as error:  # no login, no network, no such entity: W&B has a type for each
        sys.stderr.write(f"W&B did not take the workspace: {' '.join(str(error).split()) or type(error).__name__}\n")
        return 1
    sys.stdout.write(f"{workspace.url}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
