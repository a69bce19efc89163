"""The proxy in front of a service, as far as requests from outside show what it does to them."""

import asyncio
import os
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson
from yarl import URL

from pysync.auth import issuing, signing
from pysync.auth.addresses import forwarded_ip
from pysync.auth.identity_keys import IdentityKeys
from pysync.clock import wall_clock_ms
from pysync.config import Config, Problem
from pysync.config.routes import routes_of
from pysync.config.schema import LOOPBACK
from pysync.diagnose.report import Report

WATCH_S: Final = 10.0
"""Seconds for a response, and for the first bytes and two heartbeats of a change stream."""
_MAX_ANSWER: Final = 64 * 1024
"""Bytes of an answer above which no more is read."""
_FORGED: Final = "192.0.2.1"
"""An address that no client has (RFC 5737)."""
_ALIASES: Final = ("//health", "/%2Fhealth", "/-/%2e%2e/health")
"""Paths that lead to `/health` only if somebody normalises them: pysync does not."""


class ProxyProbe:
    """Requests to the service of `config` at `url`, the URL before `/pull`, which show what a proxy does to
    them. Rows of `report` say what could not be checked."""

    def __init__(self, config: Config, url: str, report: Report, watch_s: float = WATCH_S) -> None:
        self._config, self._base, self._report, self._watch_s = config, url.rstrip("/"), report, watch_s

    async def run(self) -> None:
        """Make the requests. The admin token is sent over HTTPS or to this machine alone."""
        self._report.rows.append(("url", self._base))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._watch_s, sock_read=self._watch_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
                if await self._check_health():
                    await self._check_host()
                    await self._check_path()
                    await self._check_streams()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._report.problems.append(Problem("url", str(error) or "no answer in time"))

    async def _check_health(self) -> bool:
        """Return True if pysync answers. Compare the clocks, and the addresses that arrive: a holder of the
        admin token learns them."""
        headers, needed = {"X-Forwarded-For": _FORGED}, ""
        token = self._config.auth.admin_token
        if not token:
            needed = "auth.adminToken"
        elif not self._base.startswith("https:") and urlsplit(self._base).hostname not in LOOPBACK:
            needed = "https, because the admin token is sent"
        else:
            headers["Authorization"] = f"Bearer {token if isinstance(token, str) else token[0]}"
        sent_ms = wall_clock_ms()
        status, body, date = await self._request("GET", "/health", headers)
        if not body.get("ok"):
            self._add("pysync", "not found", f"GET /health answers {status}, and not as pysync does")
            return False
        with suppress(ValueError, OverflowError):  # no date
            date_ms = round(parsedate_to_datetime(date).timestamp() * 1000)
            self._report.add_clock_skew("url", (sent_ms + wall_clock_ms()) // 2 - date_ms)
        match body.get("received"):
            case {"client": str(client), "forwardedFor": str(forwarded_for)}:
                self._check_addresses(client, forwarded_for)
            case _:
                self._add("addresses", f"not checked: that takes {needed or 'the admin token of the server'}")
        return True

    def _check_addresses(self, client: str, forwarded_for: str) -> None:
        seen = [forwarded_ip(forwarded_for, hops) for hops in range(1, forwarded_for.count(",") + 2)]
        trusted = self._config.server.trusted_proxy_hops
        hops = f"server.trustedProxyHops is {trusted}"
        fault = None
        if seen[0] in (None, _FORGED):
            fault = "nothing adds one to X-Forwarded-For: behind a proxy all callers count as one"
        elif client == _FORGED:
            fault = f"{hops}, and fewer proxies add theirs to X-Forwarded-For: callers can forge their own"
        elif not trusted or client not in seen:
            fault = f"{hops}: the proxy is taken for the caller; set it to the number of proxies"
        self._add("addresses", f"forwarded: yours is {client}", fault)

    async def _check_host(self) -> None:
        """Check the Host header: a POST of a page is refused if that is not the page's host."""
        server, parts = self._config.server, urlsplit(self._base)
        origin = f"{parts.scheme}://{parts.netloc}"
        if {"*", origin} & {*server.cors.origins} and not server.public_hosts:
            self._add("host", "not checked: that takes server.publicHosts, or other cors.origins")
            return
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        status, body, _ = await self._request("POST", "/revocations", headers)
        fault = None
        if status == 421 and (host := signing.canonical_host(self._base)) not in server.public_hosts:
            fault = f"server.publicHosts lacks {host}"
        elif status == 421 or body.get("code") == "foreign_origin":
            fault = "the proxy changes the Host header, which signatures cover"
        elif "code" not in body:
            fault = f"POST /revocations answers {status}, and not as pysync does"
        self._add("host", "unchanged", fault)

    async def _check_path(self) -> None:
        rewritten = [alias for alias in _ALIASES if (await self._request("GET", alias))[1].get("ok")]
        fault = "the proxy rewrites paths, which signatures cover: {} arrives as /health"
        self._add("path", "unchanged", fault.format(rewritten[0]) if rewritten else None)

    async def _check_streams(self) -> None:
        """Watch a change stream, without credentials, else signed with a new key."""
        found = [spec for spec in routes_of(self._config) if spec.action == "events"]
        target = found[0].path.removeprefix(self._config.server.mount_path) if found else "/events"
        if not (await self._watch(target, {}) or await self._watch(target, self._sign(target))):
            self._add("streams", "not checked: a new key may read no collection, or is not accepted")

    async def _watch(self, target: str, credentials: dict[str, str]) -> bool:
        """Return False if there is no stream for these credentials."""
        headers, begun_s, fault = {"Accept-Encoding": "gzip", **credentials}, time.monotonic(), None
        try:
            async with (
                asyncio.timeout(self._watch_s),
                self._session.get(self._base + target, headers=headers) as answer,
            ):
                if answer.status != 200:
                    return False
                if (encoding := answer.headers.get("Content-Encoding")) is not None:
                    fault = f"the proxy compresses change streams ({encoding}): exempt text/event-stream"
                for _ in range(0 if fault else 3):
                    if not await answer.content.readany():
                        raise aiohttp.ClientPayloadError
        except TimeoutError:
            fault = f"the proxy buffers change streams: two heartbeats take more than {self._watch_s:g} s"
        except aiohttp.ClientPayloadError:
            fault = "the proxy cuts change streams: it has to wait for data for more than 4 s"
        self._add("streams", f"as they come, for {time.monotonic() - begun_s:.0f} s", fault)
        return True

    async def _request(
        self, method: str, path: str, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], str]:
        """Return status, JSON object and Date of a response."""
        url, text = URL(self._base + path, encoded=True), b""
        async with (
            asyncio.timeout(self._watch_s),
            self._session.request(method, url, headers=headers, allow_redirects=False) as answer,
        ):
            while len(text) <= _MAX_ANSWER and (piece := await answer.content.readany()):
                text += piece
            try:
                body = orjson.loads(text)
            except ValueError:
                body = None
            return answer.status, body if isinstance(body, dict) else {}, answer.headers.get("Date", "")

    def _sign(self, target: str) -> dict[str, str]:
        """Return the credentials of a new key."""
        keys, now_ms = IdentityKeys.generate(), wall_clock_ms()
        certificate = issuing.issue_device_certificate(
            keys, keys.ed_pub, keys.kem_pub, now_s=now_ms // 1000, nonce=os.urandom(16)
        )
        host = signing.canonical_host(self._base)
        signed = signing.sign_request(keys, "GET", target, b"", host, now_ms, os.urandom(16))
        return signed | {"Authorization": certificate.authorization}

    def _add(self, what: str, finding: str, fault: str | None = None) -> None:
        self._report.rows.append((f"url {what}", "wrong" if fault else finding))
        if fault:
            self._report.problems.append(Problem(f"url {what}", fault))
