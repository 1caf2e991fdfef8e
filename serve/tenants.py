"""Tenants: who a request belongs to, and its share of the server. Rules come from a JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .._core import ConfigError
from ..common.json_fields import JsonFields, load_json_object
from ..formats.sources.sum_of_names import parse_sum
from .adapter_names import is_name

OTHERS: Final = "others"
"""Name of the tenant of requests that match no other."""
MAX_TENANTS: Final = 1000
"""Maximum number of tenants of a file. Each has its own series in the metrics."""
MAX_FILE_BYTES: Final = 4 << 20
MAX_TOKENS_PER_MINUTE: Final = 1 << 40
MAX_WEIGHT: Final = 1e6


@dataclass(frozen=True)
class Tenant:
    """A tenant's share of the server. None: no limit."""

    name: str
    weight: float = 1.0
    """Share of the computed tokens, relative to the other tenants whose requests wait."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers. An unused minute can be used at once."""
    max_requests: int | None = None
    """Number of HTTP requests at a time."""
    first_token_seconds: float | None = None
    """Target for the time from a request's arrival to its first token."""


@dataclass(frozen=True)
class TenantRules:
    """All tenants, and the requests that belong to each."""

    tenants: tuple[Tenant, ...] = ()
    others: Tenant = field(default_factory=lambda: Tenant(OTHERS))
    clients: Mapping[str, Tenant] = field(default_factory=dict)
    """Tenants by the client of a request, as in RequestRecord.client."""
    adapters: tuple[tuple[str, Tenant], ...] = ()
    """Tenants by adapter: a name, or the beginning of names followed by '*'. The first match counts."""

    def __iter__(self) -> Iterator[Tenant]:
        yield from self.tenants
        yield self.others

    def tenant_of(self, client: str, adapter: str | None) -> Tenant:
        """Returns the tenant of a request: its client's, or else its adapter's. In a weighted sum, the first term that
        has a tenant decides.
        """
        if client in self.clients:
            return self.clients[client]
        if adapter is None:
            return self.others
        named = parse_sum(adapter)
        for name in (adapter,) if named is None else named.names:
            for pattern, tenant in self.adapters:
                if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                    return tenant
        return self.others


def key_client(index: int) -> str:
    """Returns the client of a request with the key at this index of the server's keys."""
    return f"key {index}"


def read_tenants(path: Path, api_keys: Sequence[str]) -> TenantRules:
    """Reads the rules in a file. Raises ConfigError that names the file and every field that cannot be used.

    api_keys: the server's keys; a tenant's keys must be among them.
    """
    fields = JsonFields(load_json_object(path, ConfigError, max_bytes=MAX_FILE_BYTES))
    tenants: list[Tenant] = []
    clients: dict[str, Tenant] = {}
    adapters: dict[str, Tenant] = {}
    listed = fields.object("tenants")
    names = [] if listed is None else list(listed.remaining())
    if len(names) > MAX_TENANTS:
        raise ConfigError(f"{path}: tenants has {len(names)} tenants; expected at most {MAX_TENANTS}")
    for name in names:
        assert listed is not None
        if name == OTHERS or not is_name(name):
            listed.problem(name, f"is the name of a tenant; expected one that can be printed, and not '{OTHERS}'")
        rules = listed.object(name)
        if rules is None:
            continue
        tenant = _tenant(name, rules)
        tenants.append(tenant)
        if "api_keys" not in rules and "adapters" not in rules:
            listed.problem(name, "has no requests; expected api_keys, adapters, or both")
        _take_keys(rules, tenant, api_keys, clients)
        _take_adapters(rules, tenant, adapters)
    rest = fields.object(OTHERS, optional=True)
    others = Tenant(OTHERS) if rest is None else _tenant(OTHERS, rest)
    fields.finish(str(path), ConfigError)
    return TenantRules(tuple(tenants), others, clients, tuple(adapters.items()))


def _tenant(name: str, fields: JsonFields) -> Tenant:
    weight = fields.number("weight", above=True, default=1.0)
    if weight > MAX_WEIGHT:
        fields.problem("weight", f"is {weight}; it must be at most {MAX_WEIGHT:.0f}")
    return Tenant(
        name,
        weight,
        fields.optional_integer("tokens_per_minute", maximum=MAX_TOKENS_PER_MINUTE),
        fields.optional_integer("max_requests"),
        fields.optional_number("first_token_seconds", above=True),
    )


def _take_keys(fields: JsonFields, tenant: Tenant, api_keys: Sequence[str], clients: dict[str, Tenant]) -> None:
    """Adds the clients of a tenant's keys. Problems do not show the keys."""
    if "api_keys" not in fields:
        return
    given = fields.raw("api_keys")
    if not isinstance(given, list) or not all(isinstance(key, str) for key in given):
        fields.problem("api_keys", "is something else; expected a list of strings")
        return
    for index, key in enumerate(given):
        if key not in api_keys:
            fields.problem(f"api_keys[{index}]", "is not a key of this server; expected a value of --api-key")
        elif (taken := clients.setdefault(key_client(api_keys.index(key)), tenant)) is not tenant:
            fields.problem(f"api_keys[{index}]", f"is also a key of the tenant '{taken.name}'; expected one tenant")


def _take_adapters(fields: JsonFields, tenant: Tenant, adapters: dict[str, Tenant]) -> None:
    for index, pattern in enumerate(fields.strings("adapters") if "adapters" in fields else ()):
        if not pattern or "*" in pattern[:-1]:
            fields.problem(f"adapters[{index}]", f"is '{pattern}'; expected a name, or the beginning of names and '*'")
        elif (taken := adapters.setdefault(pattern, tenant)) is not tenant:
            fields.problem(
                f"adapters[{index}]", f"is '{pattern}', as in the tenant '{taken.name}'; expected one tenant"
            )
