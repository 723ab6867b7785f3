"""This module writes docs/metrics.md from the declarations of the metrics.

    python -m tests.unit.metrics_table [FILE]

writes the page, or prints it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice import process_metrics
from sluice.broker import metrics as broker_metrics
from sluice.nameserver import metrics as nameserver_metrics
from sluice.telemetry import Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

_HEAD = """# Metrics

`sluice serve` and `sluice broker` serve them at `http://127.0.0.1:5557/metrics`, `sluice
nameserver` at `http://127.0.0.1:5556/metrics`, in Prometheus's text format. `/healthz` beside it
answers 200 while the process takes messages; 503, with the reason, while it starts or its store
refuses appends.

```yaml
scrape_configs:
  - job_name: sluice
    static_configs:
      - targets: ["127.0.0.1:5557"]
```

* `--metrics-host` and `--metrics-port` change the address (RocketMQ's `metricsPromExporterHost`
  and `metricsPromExporterPort`); port 0 takes a free one, and the process prints it.
  `--no-metrics` closes it (`metricsExporterType=DISABLE`). There is no password: leave it on
  loopback, or in a network that may read names of topics and groups.
* A broker inside a program (`Broker(config)`) listens on no port for this; its
  `metrics.collect` fills a page.
* All names of ours begin with `sluice_`; units are seconds and bytes. The last column is what the
  exporter of Apache's broker calls the same thing. `process_*` are the names that all of
  Prometheus's client libraries have.
* Topics and groups get lines of their own up to `metrics_names_max`, whoever comes first. The
  others are counted together under the name `(other)`.
* A histogram has a bucket for each power of two nanoseconds from 16 us to 34 s.
  `sluice_send_seconds` counts each message: those of one turn of the event loop are measured
  together, from the first of them.
* What a page needs from the disk is read on a thread; many requests at one time get one page.

"""


def page_text() -> str:
    """The whole page."""
    return _HEAD + "\n".join(
        [
            *_section("A broker", broker_metrics.METRICS),
            *_section("A nameserver", nameserver_metrics.METRICS),
            *_section("Every process", process_metrics.METRICS),
        ]
    )


def _section(title: str, metrics: tuple[Metric, ...]) -> list[str]:
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} "
        f"| {f'`{metric.rocketmq}`' if metric.rocketmq else ''} |"
        for metric in metrics
    ]
    head = ["| Name | Kind | Labels | What | RocketMQ's name |", "|---|---|---|---|---|"]
    return [f"## {title}", "", *head, *rows, ""]


def main(arguments: list[str]) -> int:
    if arguments:
        Path(arguments[0]).write_text(page_text(), encoding="utf-8")
    else:
        sys.stdout.write(page_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
