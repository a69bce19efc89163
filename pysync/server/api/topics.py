"""Requests for the changes of collections: which collections a query names, and what its caller may receive.

See docs/reference/protocol.md#subscribe.
"""

from collections.abc import Callable, Mapping, Sequence

import orjson
from aiohttp import web

from pysync import _core
from pysync.auth.authentication import NO_CREDENTIALS, AuthenticatedRequest
from pysync.auth.policy import AccessPolicy
from pysync.config.key_templates import is_parameter
from pysync.engine.subscriptions import Topic
from pysync.errors import Forbidden, InvalidParams, MissingCollections, Unauthorized, UnknownCollection
from pysync.model import Caller
from pysync.server.api import Service
from pysync.server.stream_authorization import StreamAuthorizer, StreamGrant, topic_of


class TopicRequests:
    """The requests for changes of one namespace. `policies` are those of pulls of its collections."""

    def __init__(
        self, service: Service, policies: Sequence[AccessPolicy], authorizer: StreamAuthorizer
    ) -> None:
        self._policies = {policy.collection.name: policy for policy in policies}
        self._namespace = policies[0].namespace
        self._authenticator = service.authenticator
        self._authorizer = service.authorizer
        self._grant = authorizer.grant

    async def admit(
        self,
        request: web.BaseRequest,
        check: Callable[[AuthenticatedRequest], None] = lambda verified: None,
    ) -> tuple[AuthenticatedRequest, StreamGrant]:
        """Return who sends a request, and the changes that it may receive of those that it names. It counts
        as a pull of each of these collections. `check` may reject it before the nonce is consumed.

        Raises:
            BadRequest: a collection or parameter does not exist.
            Unauthorized: the credentials are invalid, or missing and no collection is open.
            Forbidden: the caller may read none of the collections.
            RateLimited, Unavailable.
        """
        named, wanted = self._parse(request.query)
        credentials = NO_CREDENTIALS
        if any(policy.needs_credentials for policy in named):
            credentials = self._authenticator.parse_credentials(request.headers)

        def metered(caller: Caller) -> list[AccessPolicy]:
            granted = self._grant(wanted, caller).filter
            return [policy for policy in named if topic_of(policy) in granted]

        async def decide(verified: AuthenticatedRequest) -> tuple[AuthenticatedRequest, StreamGrant]:
            grant = self._grant(wanted, verified.caller)
            if not grant.filter:
                if credentials is NO_CREDENTIALS:
                    raise Unauthorized("no credentials")
                raise Forbidden(reason="roles: none of the collections")
            check(verified)
            return verified, grant

        return await self._authorizer.admit(request, self._namespace, credentials, b"", metered, decide)

    def _parse(
        self, query: Mapping[str, str]
    ) -> tuple[list[AccessPolicy], Mapping[Topic, Mapping[str, str]]]:
        """Return the policies of the collections that a query names, and the parameters that it requests of
        each."""
        sets = _param_sets(query.get("params"))
        text = query.get("collections")
        names = self._policies if text is None else dict.fromkeys(filter(None, text.split(",")))
        if not names:
            raise MissingCollections
        if not sets.keys() <= names.keys() or not names.keys() <= self._policies.keys():
            raise UnknownCollection
        policies = [self._policies[name] for name in names]
        return policies, {
            topic_of(policy): _values(policy, sets.get(policy.collection.name, {})) for policy in policies
        }


def _param_sets(text: str | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        sets = orjson.loads(text)
    except ValueError:
        raise InvalidParams from None
    if not isinstance(sets, dict):
        raise InvalidParams
    return sets


def _values(policy: AccessPolicy, param_set: object) -> Mapping[str, str]:
    """Return the values that a param-set requests. Raises InvalidParams if no document can have them."""
    names = policy.collection.path_template.params
    if not isinstance(param_set, dict) or not param_set.keys() <= set(names):
        raise InvalidParams
    values = {name: _text(value) for name, value in param_set.items()}
    if not all(map(is_parameter, values.values())):
        raise InvalidParams
    return values


def _text(value: object) -> str:
    """Return a parameter's value: text, or a number as ECMAScript writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParams
    return _core.canonicalize(orjson.dumps(value)).decode() if isinstance(value, float) else str(value)
