"""From a comparison to the report that wandb-workspaces would save, and to its JSON."""

import json
from typing import Any

from eke.results.report.compare import Comparison
from eke.results.report.show.sections import provenance, sections
from eke.results.report.wandb import texts
from eke.results.report.wandb.keys import factor_paths, grouping
from eke.results.report.wandb.library import workspaces
from eke.results.report.wandb.panels import panel_grid
from eke.results.report.wandb.place import Place, find_filter


def specification(
    comparison: Comparison, place: Place, repeats: bool = False, is_online: bool = False
) -> Any:
    """The report, as an object of wandb-workspaces; what it says is what the other formats say.

    Args:
        comparison: what is reported.
        place: the project that it, and the runs, are filed under.
        repeats: list every run, too.
        is_online: name the project to the run set, too, which asks the server for its number;
            without, W&B takes the report's own.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """
    library = workspaces()
    blocks = [library.MarkdownBlock(texts.opening(comparison))]
    if comparison.rows:
        blocks += _titled("Configurations", texts.main_table(comparison))
    if found := find_filter(comparison):
        factors, groups = factor_paths(comparison), grouping(comparison)
        where = place if is_online else None
        blocks += _titled("Charts", texts.live(found, place))
        blocks.append(panel_grid(library, found, where, factors, groups))
    for section in (*sections(comparison, repeats), provenance(comparison)):
        blocks += _titled(section.title, texts.section_table(section))
    if comparison.notes:
        blocks += _titled("Notes", texts.notes(comparison))
    return library.Report(
        # Never None: it would be asked for at the server.
        entity=place.entity,
        project=place.project,
        title=texts.title(comparison),
        description="made by eke report",
        blocks=blocks,
        width="fluid",
    )


def dump(report: Any) -> str:
    """What `save` sends, as JSON: `spec` is the string of its mutation `upsertView`, parsed."""
    model = report._to_model()  # wandb-workspaces 0.4.13 has no public way to it
    content = {
        "displayName": model.display_name,
        "description": model.description,
        "entityName": model.project.entity_name,
        "projectName": model.project.name,
        "type": "runs",
        "spec": json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }
    return json.dumps(content, indent=1) + "\n"


def _titled(title: str, text: str) -> list[Any]:
    library = workspaces()
    return [library.H2(title), library.MarkdownBlock(text)]
