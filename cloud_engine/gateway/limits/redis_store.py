"""Limit accounts in Redis or Valkey, shared by several gateways.

Every change is one atomic Lua script. A worker's reservations count while the worker renews its lease. When the worker
dies, its reservations from budgets count as spent, and the others expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....accounting.accounts import PERIOD_S, AccountUsage, Claim
from ....accounting.budget import SHARE, TokenDemand
from ....protocol.errors import ConfigurationError, MissingDependencyError, OverloadedError
from ....protocol.safety.redaction import shown_url
from .store import Admission, Settlement, unreachable

if TYPE_CHECKING:
    from redis.asyncio import Redis  # pyright: ignore[reportMissingImports]

LEASE_S = 15.0
_RENEWED_S = 3.0
_ANSWER_S = 2.0
_CONNECTIONS = 16
_MAX_UNSETTLED = 10_000
_log = logging.getLogger("updraft.gateway")

# The Lua version of the module `accounts`. An account is a Redis hash with the field `value`, and one field per worker
# for its reservations. All keys share one hash tag, so that a Redis cluster keeps them on one server.
_SCRIPT = f"""
local prefix, worker, action = '{{updraft}}:', ARGV[1], ARGV[2]
local receipt, least, most = prefix .. 'unsettled:' .. ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('SET', prefix .. 'worker:' .. worker, 1, 'PX', {LEASE_S * 1000:.0f})

local function used(kind, limit, value)
  if kind == 'rate' then return math.max(0, value - now) * limit / {PERIOD_S} end
  return kind == 'budget' and value or 0
end

local function use(key, kind, limit, amount, ends)
  local value = tonumber(redis.call('HGET', key, 'value') or '0')
  if kind == 'rate' then
    value = math.max(value, now) + amount * {PERIOD_S} / limit
    ends = value
  elseif kind == 'budget' then
    value = value + amount
  else
    value = 0
  end
  redis.call('HSET', key, 'value', string.format('%.17g', value))
  redis.call('PEXPIRE', key, math.ceil(math.max(ends - now, 86400) * 1000))
end

local function spend(key, kind, amount)
  if kind == 'budget' and amount ~= 0 then
    local value = tonumber(redis.call('HGET', key, 'value') or '0') + amount
    redis.call('HSET', key, 'value', string.format('%.17g', value))
  end
end

local function reserve(key, kind, amount)
  local reserved = tonumber(redis.call('HGET', key, worker) or '0') + amount
  if reserved > 1e-12 then
    redis.call('HSET', key, worker, string.format('%.17g', reserved))
  else
    redis.call('HDEL', key, worker)
    spend(key, kind, math.min(reserved, 0))  -- what `reserved` counted as spent while this worker's lease had expired
  end
end

local function reserved(key, kind)
  local sum, fields = 0, redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    if fields[i] ~= 'value' then
      if redis.call('EXISTS', prefix .. 'worker:' .. fields[i]) == 1 then
        sum = sum + tonumber(fields[i + 1])
      else
        redis.call('HDEL', key, fields[i])
        spend(key, kind, tonumber(fields[i + 1]))
      end
    end
  end
  return sum
end

-- Tokens granted to an admission beyond the minimum; false once the admission is settled.
local granted = {{}}
local function settles(receipt)
  if granted[receipt] == nil then
    local name = prefix .. 'unsettled:' .. receipt
    granted[receipt] = tonumber(redis.call('GET', name) or '') or false
    redis.call('DEL', name)
  end
  return granted[receipt]
end

local available, alone = math.huge, true
local result = {{string.format('%.17g', now), 'taken', 0}}
for i, key in ipairs(KEYS) do
  local at = 7 + (i - 1) * 7
  local kind, limit, amount = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local ends, settled, per_token = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  local value = redis.call('HGET', key, 'value')
  if action == 'settle' then
    local more = settles(ARGV[at + 6])
    if more and (value or kind ~= 'budget') then
      reserve(key, kind, -(amount + more * per_token))
      use(key, kind, limit, settled, ends)
    end
  elseif action == 'seed' then
    if not value then use(key, kind, limit, settled, ends) end
  elseif kind == 'budget' and not value then
    return {{result[1], 'unknown', i - 1}}
  else
    local held = reserved(key, kind)
    local before = used(kind, limit, tonumber(redis.call('HGET', key, 'value') or '0'))
    table.insert(result, string.format('%.17g', before))
    table.insert(result, string.format('%.17g', held))
    if amount > 0 and before + held + amount > limit * (1 + 1e-9) then
      result[2], result[3] = 'refused', i - 1
      return result
    end
    if per_token > 0 then
      available, alone = math.min(available, (limit - before - held - amount) / per_token), alone and held == 0
    end
  end
end
if action == 'admit' then
  local more = 0
  if most > least then  -- as `TokenDemand.granted`
    local share = (available + least) / {SHARE}
    if most <= ((alone or ARGV[6] == '1') and available + least or share) then share = most end
    more = math.min(most, math.max(least, math.floor(share))) - least
  end
  result[3] = least + more
  for i, key in ipairs(KEYS) do
    local at = 7 + (i - 1) * 7
    if ARGV[at + 4] == '1' then
      reserve(key, ARGV[at], tonumber(ARGV[at + 2]) + more * tonumber(ARGV[at + 5]))
      redis.call('SET', receipt, more, 'PX', 86400000)
      redis.call('PEXPIRE', key, 86400000 + math.ceil(math.max(tonumber(ARGV[at + 3]) - now, 0) * 1000))
    else
      use(key, ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), 0)
    end
  end
end
return result
"""


class RedisStore:
    """Limits in Redis. Raises ConfigurationError for a bad URL, MissingDependencyError without the client."""

    def __init__(self, url: str) -> None:
        try:
            from redis.asyncio import BlockingConnectionPool, Redis  # pyright: ignore[reportMissingImports]
            from redis.exceptions import RedisError  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingDependencyError("Limits in Redis need the redis package: pip install redis.") from error
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_CONNECTIONS,
                timeout=_ANSWER_S,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_ANSWER_S,
                decode_responses=True,
            )
        except ValueError as error:
            raise ConfigurationError(f"{shown_url(url)} is not the URL of a Redis server: {error}.") from error
        self._redis: Redis = Redis.from_pool(pool)
        self._failure: type[Exception] = RedisError
        self._script = self._redis.register_script(_SCRIPT)
        self._worker = secrets.token_hex(8)
        self._unsettled: deque[Sequence[Settlement]] = deque(maxlen=_MAX_UNSETTLED)
        self.failing = False
        self._renewal: asyncio.Task[None] | None = None
        self._closes = asyncio.Event()

    async def admit(self, claims: Sequence[Claim], wanted: TokenDemand | None = None) -> Admission:
        receipt = secrets.token_hex(8)
        try:
            parts = [(claim, float(claim.is_reserved), "") for claim in claims]
            now, outcome, at, *numbers = await self._run("admit", parts, receipt, wanted)
        except (OverloadedError, asyncio.CancelledError):  # the claims may be taken even if the reply was lost
            self._unsettled.append([(claim, 0.0, receipt) for claim in claims if claim.is_reserved])
            raise
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        usages = [AccountUsage(float(before), float(held)) for before, held in pairs]
        return Admission(
            usages,
            claims[at] if outcome == "refused" else None,
            claims[at] if outcome == "unknown" else None,
            float(now),
            claims,
            receipt,
            at if outcome == "taken" else 0,
        )

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Settle claims, or queue them if the server is down. The receipt makes a repeated settlement a no-op."""
        try:
            await self._run("settle", settlements)
        except (OverloadedError, asyncio.CancelledError) as error:
            self._unsettled.append(settlements)
            if isinstance(error, asyncio.CancelledError):
                raise

    async def seed(self, claim: Claim, spent: float) -> None:
        await self._run("seed", [(claim, spent, "")])

    async def close(self) -> None:
        self._closes.set()
        if self._renewal is not None:
            await asyncio.wait([self._renewal], timeout=_ANSWER_S)  # redis-py may ignore cancellation: wait first
            self._renewal.cancel()
        await self._redis.aclose()

    async def _renew(self) -> None:
        while not self._closes.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closes.wait(), _RENEWED_S)
            with contextlib.suppress(OverloadedError):
                await self._run("renew", ())
                while self._unsettled:
                    await self._run("settle", self._unsettled[0])
                    self._unsettled.popleft()

    async def _run(
        self, action: str, parts: Sequence[Settlement], receipt: str = "", wanted: TokenDemand | None = None
    ) -> list[Any]:
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())
        keys = [f"{{updraft}}:{claim.account}" for claim, _, _ in parts]
        least, most, is_known = (wanted.least, wanted.most, int(wanted.is_known)) if wanted is not None else (0, 0, 0)
        arguments: list[str | float] = [self._worker, action, receipt, least, most, is_known]
        for claim, amount, settles in parts:
            kind = "rate" if claim.is_rate else "budget" if claim.is_budget else "concurrent"
            arguments += [kind, repr(claim.limit), repr(claim.amount), repr(claim.ends), f"{amount:.17g}"]
            arguments += [repr(claim.per_token), settles]
        try:
            answer: list[Any] = await self._script(keys=keys, args=arguments)
        except (self._failure, OSError) as error:
            if not self.failing:
                _log.error("Cannot reach the Redis server for the limits: %s.", error)
            self.failing = True
            raise unreachable("The gateway cannot reach its limits store (--limits-url)") from error
        self.failing = False
        return answer
