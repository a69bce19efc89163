"""Rate limits on the actions of collections."""

from collections.abc import Iterable

from pysync.auth.policy import AccessPolicy
from pysync.config import Limit
from pysync.coordinator import Coordinator
from pysync.errors import RateLimited


class RateLimiter:
    """The rate limits of one service. Its coordinator counts, so the limits apply across processes."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def enforce(self, identity: str, client_ip: str, policies: Iterable[AccessPolicy]) -> None:
        """Count a request against the limits of `policies`. Raises RateLimited and CoordinatorUnavailable."""
        for policy in policies:
            for limit, bucket in _buckets(policy, identity, client_ip):
                await self.count(limit, bucket)

    async def count(self, limit: Limit, bucket: str) -> None:
        """Count one request in `bucket`. Raises RateLimited if it exceeds the limit, and
        CoordinatorUnavailable."""
        window = await self._coordinator.increment(bucket, limit.window_ms)
        if window.count > limit.max_requests:
            raise _rate_limited(limit, window.resets_in_ms)


def _buckets(policy: AccessPolicy, identity: str, client_ip: str) -> list[tuple[Limit, str]]:
    """Return the limits that apply to a request, each with the name of its counter."""
    rule = policy.limit
    if rule is None:
        return []
    who = f"identity={identity}" if identity else f"ip={client_ip}"
    buckets = {"identity": who, "ip": f"ip={client_ip}", "identity+ip": f"{who},ip={client_ip}"}
    prefix = f"{policy.namespace or ''}/{policy.collection.name}/{policy.action}"
    counters = []
    if rule.window_ms is not None and rule.max_requests is not None:
        limit = Limit(window_ms=rule.window_ms, max_requests=rule.max_requests)
        counters.append((limit, f"{prefix}:{buckets[rule.bucket or 'identity']}"))
    if rule.identity is not None:
        counters.append((rule.identity, f"{prefix}:each {buckets['identity']}"))
    if rule.ip is not None:
        counters.append((rule.ip, f"{prefix}:each {buckets['ip']}"))
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
