"""Deletes of documents, files and logs (docs/reference/protocol.md#delete)."""

from aiohttp import web

from pysync.auth import field_permissions
from pysync.engine.append_log import LogRange, LogSettings
from pysync.engine.documents import STALE_BASE
from pysync.engine.idempotency import IdempotentRequest
from pysync.errors import Conflict, InvalidBaseHash
from pysync.model import WriteResult
from pysync.server.api import Service
from pysync.server.api.files import file_key
from pysync.server.api.plugin_hooks import run_after_write
from pysync.server.authorization import Access, plugin_request
from pysync.server.http.request_body import idempotency_key
from pysync.server.http.responses import Response, write_response
from pysync.server.http.router import Match


class DeleteHandler:
    """The delete route of one collection. `log` are the settings of its logs; None for any other."""

    def __init__(self, service: Service, log: LogSettings | None) -> None:
        self._service = service
        self._log = log

    async def delete(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `DELETE {ns}/push/<key>?baseHash=<hash>`."""
        base_hash = request.query.get("baseHash")
        if base_hash is None:
            raise InvalidBaseHash("Missing query parameter: baseHash")
        service = self._service
        access = await service.authorizer.authorize(request, match)
        if match.policy.collection.field_permissions:
            field_permissions.check_delete(match.policy.collection.field_permissions, access.roles)
        about = plugin_request(match.policy, access.caller, match.params, match.key)
        await service.hooks.run_delete_hooks(about)
        once = idempotency_key(request, access.caller, match.key)
        idempotent = None if once is None else IdempotentRequest(once, f"delete {base_hash}")
        removal = self._remove(match, access, base_hash, idempotent)
        removed = await service.write_deadline.run(removal)
        await run_after_write(service, match, access.caller, removed, match.params, None, removed=True)
        return write_response("", removed.timestamp_ms)

    async def _remove(
        self, match: Match, access: Access, base_hash: str, idempotent: IdempotentRequest | None
    ) -> WriteResult:
        """Remove the version `base_hash`, and return its stored hash and the time. Raises Conflict with the
        version that the caller sees."""
        service = self._service
        if access.hidden and base_hash:
            current = await self._current(match)
            version = await service.visible_version(match, access, *current)
            base_hash = current.hash if version == base_hash else STALE_BASE
        context, collection = match.write_context(access.caller), match.policy.collection
        try:
            if self._log is not None:
                return await service.logs.delete(match.key, base_hash, self._log, context, idempotent)
            key = match.key if match.route.files is None else file_key(match, match.route.files)
            context = context._replace(ref=context.ref._replace(key=key))
            return await service.documents.delete(
                key, base_hash, collection.ttl_ms, context, collection.history, idempotent
            )
        except Conflict as error:
            version = await service.visible_version(match, access, error.current_hash, error.written_ms)
            raise Conflict(version) from None

    async def _current(self, match: Match) -> WriteResult:
        """Return hash and time of what is stored, `""` and 0 if that is nothing."""
        if self._log is not None:
            tail = await self._service.logs.read(match.key, LogRange(newest=1), self._log)
            return WriteResult(tail.hash, tail.newest_ms)
        found = await self._service.documents.get_version(match.key, match.policy.collection.ttl_ms)
        return WriteResult("", 0) if found is None else WriteResult(found.hash, found.ts_ms)
