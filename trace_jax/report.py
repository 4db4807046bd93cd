"""One picture and one page about a run, from its folder alone."""

from __future__ import annotations

import base64
import html
import json
import os
from pathlib import Path
from typing import Any

from trace_jax.metrics import read_metrics

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1f2430; background: #f6f7fa; margin: 0 }}
main {{ max-width: 1100px; margin: 0 auto; padding: 24px }}
h1 {{ font-size: 24px; margin: 0 0 4px }}
h2 {{ font-size: 17px; margin: 28px 0 8px }}
section, img {{ background: #fff; border: 1px solid #e6e8ee; border-radius: 8px }}
section {{ padding: 4px 16px; overflow-x: auto }}
img {{ width: 100%; box-sizing: border-box; padding: 8px }}
table {{ border-collapse: collapse; width: 100% }}
td {{ padding: 5px 12px 5px 0; border-top: 1px solid #e6e8ee; vertical-align: top }}
tr:first-child td {{ border-top: 0 }}
td:first-child {{ color: #5b6275; white-space: nowrap; width: 30% }}
pre {{ overflow-x: auto; font-size: 13px }}
.muted {{ color: #5b6275 }}
</style></head><body><main>
<h1>{title}</h1><div class="muted">{subtitle}</div>
<h2>Result</h2><section>{summary}</section>
<h2>The run</h2><img alt="Metrics of the run" src="data:image/png;base64,{png}">
<h2>Run it again</h2><section><pre>{command}</pre></section>
<h2>Versions</h2><section>{versions}</section>
<h2>Configuration</h2><section><pre>{config}</pre></section>
</main></body></html>
"""


def write_report(run_dir: str | Path, summary: dict[str, Any], title: str | None = None) -> Path:
    """Writes report.png and report.html into a run's folder and returns the page's path.

    Args:
        run_dir: a folder with metrics.jsonl; config.json and versions.json are shown if there.
        summary: the result, flat; shown as a table.
        title: the page's heading, the folder's name by default.

    The page holds its picture and needs no network. What was not measured says "not recorded".
    """
    from trace_jax.report_figures import draw_report, plt  # matplotlib loads only for reports

    run_dir = Path(run_dir)
    rows = read_metrics(run_dir)
    title = title or f"Run {run_dir.resolve().name}"
    figure = draw_report(rows, title)
    _replace(run_dir / "report.png", lambda path: figure.savefig(path, format="png", dpi=110))
    plt.close(figure)
    versions = _read(run_dir / "versions.json") or {}
    config = _read(run_dir / "config.json")
    page = PAGE.format(
        title=html.escape(title),
        subtitle=html.escape(f"{len(rows)} rows of metrics"
                             + (f", {versions['hardware']}" if "hardware" in versions else "")),
        summary=_table(summary),
        png=base64.b64encode((run_dir / "report.png").read_bytes()).decode(),
        command=html.escape(versions.get("command") or "not recorded"),
        versions=_table({k: v for k, v in versions.items() if k not in ("command", "resumed")}),
        config=html.escape(json.dumps(config, indent=2) if config else "not recorded"),
    )
    _replace(run_dir / "report.html", lambda path: path.write_text(page, encoding="utf-8"))
    return run_dir / "report.html"


def _table(values: dict[str, Any]) -> str:
    if not values:
        return "<p>not recorded</p>"
    cells = (f"<tr><td>{html.escape(str(k).replace('_', ' '))}</td>"
             f"<td>{html.escape(_shown(v))}</td></tr>" for k, v in values.items())
    return f"<table>{''.join(cells)}</table>"


def _shown(value: Any) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file of the run, or None: a report must come out of a damaged folder too."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _replace(path: Path, write: Any) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    write(scratch)
    os.replace(scratch, path)
