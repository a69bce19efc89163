"""Rate limits: how often a caller may ask for an action of a collection."""

from collections.abc import Iterable

from pysync.auth.policy import AccessPolicy
from pysync.config import Limit
from pysync.coordinator import Coordinator
from pysync.errors import RateLimited


class RateLimiter:
    """The rate limits of one service, counted by its coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def enforce(self, identity: str, client_ip: str, policies: Iterable[AccessPolicy]) -> None:
        """Count a request against the limits of `policies`. Raises RateLimited, CoordinatorUnavailable."""
        for policy in policies:
            for limit, bucket in _buckets(policy, identity, client_ip):
                await self.count(limit, bucket)

    async def count(self, limit: Limit, bucket: str) -> None:
        """Count one request in `bucket`. Raises RateLimited where it is one too many."""
        window = await self._coordinator.increment(bucket, limit.window_ms)
        if window.count > limit.max_requests:
            raise _rate_limited(limit, window.resets_in_ms)


def _buckets(policy: AccessPolicy, identity: str, client_ip: str) -> list[tuple[Limit, str]]:
    """The limits that a request counts against, each with the name of its counter."""
    asked = policy.limit
    if asked is None:
        return []
    who = f"identity={identity}" if identity else f"ip={client_ip}"
    buckets = {"identity": who, "ip": f"ip={client_ip}", "identity+ip": f"{who},ip={client_ip}"}
    prefix = f"{policy.namespace or ''}/{policy.collection.name}/{policy.action}"
    counters = []
    if asked.window_ms is not None and asked.max_requests is not None:
        limit = Limit(window_ms=asked.window_ms, max_requests=asked.max_requests)
        counters.append((limit, f"{prefix}:{buckets[asked.bucket or 'identity']}"))
    if asked.identity is not None:
        counters.append((asked.identity, f"{prefix}:each {buckets['identity']}"))
    if asked.ip is not None:
        counters.append((asked.ip, f"{prefix}:each {buckets['ip']}"))
    return counters


def _rate_limited(limit: Limit, resets_in_ms: int) -> RateLimited:
    wait_s = max(1, -(-resets_in_ms // 1000))
    window_s = max(1, -(-limit.window_ms // 1000))
    return RateLimited(
        headers={
            "Retry-After": str(wait_s),
            "RateLimit": f'"default";r=0;t={wait_s}',
            "RateLimit-Policy": f'"default";q={limit.max_requests};w={window_s}',
        }
    )
