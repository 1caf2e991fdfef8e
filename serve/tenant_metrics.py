"""Metrics of tenants. Only tenants of the rules have series, and earlier ones until their requests end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .admission import Refused, TenantUse


def tenant_metrics(uses: Iterable[TenantUse]) -> Iterator[Metric]:
    """Yields the metrics of all tenants."""
    waiting = GaugeMetricFamily(
        "adaptrt_tenant_requests_waiting", "Requests that wait for their turn.", labels=["tenant"]
    )
    running = GaugeMetricFamily("adaptrt_tenant_requests_running", "HTTP requests now.", labels=["tenant"])
    admitted = CounterMetricFamily(
        "adaptrt_tenant_requests_admitted", "Requests that were admitted.", labels=["tenant"]
    )
    refused = CounterMetricFamily(
        "adaptrt_tenant_requests_refused", "Requests that got 429, by the rule.", labels=["tenant", "rule"]
    )
    tokens = CounterMetricFamily(
        "adaptrt_tenant_tokens", "Tokens of prompts and answers of requests that have ended.", labels=["tenant"]
    )
    first_tokens = CounterMetricFamily(
        "adaptrt_tenant_first_tokens", "First tokens, by whether the target was met.", labels=["tenant", "in_time"]
    )
    for use in uses:
        name = use.rules.name
        waiting.add_metric([name], use.num_waiting)
        running.add_metric([name], len(use.active))
        admitted.add_metric([name], use.num_admitted)
        tokens.add_metric([name], use.num_tokens)
        for reason in Refused:
            refused.add_metric([name, reason.value], use.refused[reason])
        for in_time in (True, False):
            first_tokens.add_metric([name, str(in_time).lower()], use.first_tokens[in_time])
    yield from (waiting, running, admitted, refused, tokens, first_tokens)
