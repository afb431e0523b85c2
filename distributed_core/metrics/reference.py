"""The reference page of all metrics, made from the table.

Owns ``docs/metrics.md``: ``python -m distributed_core.metrics.reference`` writes it from the root
of a source tree, ``--check`` only says whether it is current. Not used by the daemon.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distributed_core.metrics.exporter import MAX_PREFIXES_READ
from distributed_core.metrics.monitors import LAG_BUCKETS, PAUSE_BUCKETS
from distributed_core.metrics.table import METRICS, Family, Metric

__all__ = ["main", "render"]

_INTRODUCTION: Final = f"""\
# Metrics

<!-- Made by `python -m distributed_core.metrics.reference`; change metrics/table.py instead. -->

`/metrics` on the dashboard address shows them in Prometheus's text format. A scrape costs no time
per task, and it resets nothing: any number of scrapers may come.

Names that begin with `dask_` are those of Dask's scheduler, so that its dashboards and alerts work;
the setting `metrics.namespace` replaces `dask`. Names that begin with `distributed_core_` are our
own. `python_*` and `process_*` are those of every Prometheus client in Python.

Every family is there from the start, if need be without a sample. Each has a limit of series, so
that labels cannot grow without end: what is beyond it is summed up with the label value `other`.
Of task prefixes, `metrics.max-prefix-labels` have series of their own: those with tasks before
those without. A prefix keeps its series while it has tasks. `other` never falls when prefixes come
and go; with more than {MAX_PREFIXES_READ} prefixes at once, it takes in the newest of them only.

Maxima are those of the last minute. Buckets of `event_loop_lag_seconds` end at
{", ".join(f"{bound:g}" for bound in LAG_BUCKETS)} s, those of `gc_pause_seconds` at
{", ".join(f"{bound:g}" for bound in PAUSE_BUCKETS)} s.
"""


def render() -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    titles = {Family.DASK: "Metrics of Dask's scheduler", Family.OURS: "Our own metrics"}
    for family, title in titles.items():
        yield f"## {title}\n"
        for metric in METRICS:
            if metric.family is family:
                yield _entry(metric)


def _entry(metric: Metric) -> str:
    facts = [f"Kind: {metric.kind.value}"]
    if metric.unit:
        facts.append(f"Unit: {metric.unit}")
    if metric.labels:
        facts.append(f"Labels: {', '.join(f'`{label}`' for label in metric.labels)}")
        facts.append(
            f"Most series: {metric.budget}"
            if metric.budget
            else "Most series: `metrics.max-prefix-labels` and `other`"
            + (", each for every state" if len(metric.labels) > 1 else "")
        )
    facts.append(f"When it is high: {metric.when_high}")
    listed = "\n".join(f"- {fact}" for fact in facts)
    return f"### `{metric.full_name('dask')}`\n\n{metric.help}\n\n{listed}\n"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or check it. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m distributed_core.metrics.reference")
    parser.add_argument("path", nargs="?", default="docs/metrics.md", type=Path)
    parser.add_argument("--check", action="store_true", help="say whether the page is current")
    arguments = parser.parse_args(argv)
    page = render()
    if not arguments.check:
        arguments.path.write_text(page)
        return 0
    if arguments.path.exists() and arguments.path.read_text() == page:
        return 0
    print(f"{arguments.path} is out of date: run python -m distributed_core.metrics.reference")
    return 1


if __name__ == "__main__":
    sys.exit(main())
