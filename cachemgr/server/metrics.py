"""`/metrics` for Prometheus: what the fleet's launches add up to, what the store holds, how this replica answers.

What is about the fleet comes from the database and from the store, so that every replica tells the same, and one that
begins anew begins from the same numbers: ask any one of them, or take the maximum over instances.
"""

import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cachemgr.catalogue.measures import Measure, Measures, Timing, measures
from cachemgr.catalogue.past import PUBLISH_BUCKETS, RESTORE_BUCKETS
from cachemgr.server.backend import Backend

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_NAMES = 20
"""Engine versions, GPUs and errors that have a label of their own."""
_FRESH_SECONDS = 15.0
"""How long what was added up is told again: all launches are read for it."""
_LABELS = ("engine_version", "gpu")


class Metrics:
    """The registry of one replica."""

    def __init__(self, backend: Backend) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Fleet(backend))
        names = ("operation", "status")
        self._requests = Counter("cachemgr_requests", "Requests answered.", names, registry=self._registry)
        self._seconds = Histogram(
            "cachemgr_request_seconds", "Seconds until the answer.", ("operation",), registry=self._registry
        )

    def answered(self, operation: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(operation, str(status)).inc()
        self._seconds.labels(operation).observe(seconds)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)


class _Fleet(Collector):
    """Adds up when it is asked."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._told: Measures | None = None
        self._at = 0.0

    def describe(self) -> list[Metric]:
        """Nothing, so that nobody asks the database when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of the fleet and of the store."""
        told = self._measures()
        yield from _launches(told.launches)
        errors = CounterMetricFamily("cachemgr_errors", "Errors that launches swallowed.", labels=("name",))
        for name, count in told.errors.items():
            errors.add_metric((name,), count)
        yield errors
        yield from self._store(told)

    def _measures(self) -> Measures:
        with self._lock:
            now = self._backend.clock.monotonic()
            if self._told is None or now - self._at >= _FRESH_SECONDS:
                self._told = measures(self._backend.catalogue, self._backend.source, most=MOST_NAMES)
                self._at = now
            return self._told

    def _store(self, told: Measures) -> Iterator[Metric]:
        condition = self._backend.condition
        objects = GaugeMetricFamily("cachemgr_store_objects", "Objects in the store, by kind.", labels=("kind",))
        sizes = GaugeMetricFamily("cachemgr_store_bytes", "Bytes of objects in the store, by kind.", labels=("kind",))
        for kind, count in condition.shelves.objects.items():
            objects.add_metric((kind,), count)
            sizes.add_metric((kind,), condition.shelves.bytes[kind])
        yield objects
        yield sizes
        for name, about, value in (
            ("artifacts", "Artifacts that look-ups find.", len(self._backend.index)),
            ("damaged_captures", "Captures that cannot be used.", len(condition.damaged)),
            ("leases", "Artifacts in use by launches.", condition.shelves.objects.get("leases", 0)),
            ("quarantines", "Captures that some host does not use.", condition.shelves.objects.get("quarantines", 0)),
            ("tokens", "Tokens that are not revoked.", told.tokens),
            ("store_reachable", "Whether the store was read the last time.", int(not condition.trouble)),
        ):
            yield GaugeMetricFamily(f"cachemgr_{name}", about, value=value)


def _launches(found: tuple[Measure, ...]) -> Iterator[Metric]:
    starts = CounterMetricFamily(
        "cachemgr_launches", "Starts, by result and verdict.", labels=(*_LABELS, "result", "verdict")
    )
    saved = GaugeMetricFamily(
        "cachemgr_saved_seconds", "Seconds that warm starts saved against cold ones.", labels=_LABELS
    )
    by_gpus = GaugeMetricFamily(
        "cachemgr_saved_gpu_seconds",
        "The same once for each GPU that waited, of starts whose record says how many did.",
        labels=_LABELS,
    )
    moved = CounterMetricFamily(
        "cachemgr_moved_bytes",
        "Bytes that starts pulled from a mirror, published, or pushed to a mirror themselves.",
        labels=(*_LABELS, "way"),
    )
    restored = CounterMetricFamily("cachemgr_restored_bytes", "Bytes of restored files.", labels=_LABELS)
    added = CounterMetricFamily("cachemgr_compiled_files", "Files that were compiled anew.", labels=_LABELS)
    restore = HistogramMetricFamily("cachemgr_restore_seconds", "Seconds that restores took.", labels=_LABELS)
    publish = HistogramMetricFamily("cachemgr_publish_seconds", "Seconds that publishing took.", labels=_LABELS)
    groups: dict[tuple[str, str], list[Measure]] = {}
    for each in found:
        starts.add_metric((each.engine_version, each.gpu, each.result, each.verdict), each.starts)
        groups.setdefault((each.engine_version, each.gpu), []).append(each)
    for names, own in groups.items():
        saved.add_metric(names, sum(each.saved_seconds for each in own))
        by_gpus.add_metric(names, sum(each.saved_gpu_seconds for each in own))
        for way, sizes in (
            ("pulled", [each.pulled_bytes for each in own]),
            ("published", [each.published_bytes for each in own]),
            ("pushed", [each.pushed_bytes for each in own]),
        ):
            moved.add_metric((*names, way), sum(sizes))
        restored.add_metric(names, sum(each.restored_bytes for each in own))
        added.add_metric(names, sum(each.added_files for each in own))
        for family, bounds, timings in (
            (restore, RESTORE_BUCKETS, [each.restore for each in own]),
            (publish, PUBLISH_BUCKETS, [each.publish for each in own]),
        ):
            family.add_metric(names, _buckets(bounds, timings), sum(each.total for each in timings))
    yield from (starts, saved, by_gpus, moved, restored, added, restore, publish)


def _buckets(bounds: tuple[float, ...], timings: list[Timing]) -> list[tuple[str, float]]:
    counted = [(str(bound), float(sum(each.within[at] for each in timings))) for at, bound in enumerate(bounds)]
    return [*counted, ("+Inf", float(sum(each.count for each in timings)))]
