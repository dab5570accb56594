"""Metrics over HTTP as Ray's agents offer them, without Ray: an export that a Prometheus can scrape."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from actors.metrics import BY_NAME, METRICS, PREFIX, Sort

Series = tuple[str, tuple[tuple[str, str], ...]]


class Exporter:
    """A context, and an `actors.metrics.Export`."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}
        self.counts: dict[Series, list[int]] = {}
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(exporter.text().encode())

            def log_message(self, *arguments: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()

    def write_targets(self, path: Path) -> Path:
        """A file such as Ray's, for Prometheus to find this."""
        targets = [f"127.0.0.1:{self.server.server_port}"]
        path.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))
        return path

    def add(self, name: str, amount: float, tags: Mapping[str, str]) -> None:
        series = _series(name, tags)
        self.values[series] = self.values.get(series, 0.0) + amount

    def set(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        self.values[_series(name, tags)] = value

    def observe(self, name: str, value: float, times: int, tags: Mapping[str, str]) -> None:
        bounds = BY_NAME[name].bounds
        counts = self.counts.setdefault(_series(name, tags), [0] * (len(bounds) + 1))
        for place, bound in enumerate((*bounds, float("inf"))):
            counts[place] += times * (value <= bound)

    def text(self) -> str:
        lines = []
        for metric in METRICS:
            lines.append(f"# TYPE {PREFIX}{metric.name} {metric.sort}")
            if metric.sort is not Sort.HISTOGRAM:
                found = [(series, value) for series, value in list(self.values.items()) if series[0] == metric.name]
                lines += [f"{PREFIX}{metric.name}{{{_tags(series)}}} {value}" for series, value in found]
                continue
            for series, counts in list(self.counts.items()):
                for bound, count in zip((*metric.bounds, "+Inf"), counts, strict=True):
                    if series[0] == metric.name:
                        lines.append(f'{PREFIX}{metric.name}_bucket{{{_tags(series)},le="{bound}"}} {count}')
        return "\n".join(lines) + "\n"


def _series(name: str, tags: Mapping[str, str]) -> Series:
    return name, tuple(sorted((key, str(value)) for key, value in tags.items()))


def _tags(series: Series) -> str:
    return ",".join(f'{key}="{value}"' for key, value in series[1])
