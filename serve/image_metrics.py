"""Metrics of the images of requests."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..runtime.images.vision import Vision


class ImageCollector(Collector):
    """Metrics that are read from the vision tower when metrics are requested."""

    def __init__(self, vision: Vision) -> None:
        """Reads nothing until metrics are requested."""
        self._vision = vision

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; none if the engine takes no images."""
        if not self._vision.takes_images:
            return
        stats = self._vision.stats()
        for name, text, value in (
            ("images", "Images of prompts.", stats.num_images),
            ("image_pixels", "Pixels of these images, before they are resized.", stats.num_pixels),
            ("image_encoder_seconds", "Time of the vision tower, summed over images.", stats.seconds),
            ("image_cache_hits", "Images whose rows were not computed again.", stats.num_hits),
            ("image_cache_misses", "Images whose rows were computed.", stats.num_misses),
        ):
            yield CounterMetricFamily(f"adaptrt_{name}", text, value=value)
        yield GaugeMetricFamily("adaptrt_image_cache_bytes", "Size of the kept rows.", value=stats.num_cached_bytes)
