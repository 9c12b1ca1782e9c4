"""`/updraft/models`: list, pull and remove this device's models, and control their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ....protocol.decoding import decode, read_object
from ....protocol.dialects.ollama_answers import CONTENT_TYPE, pull_line
from ....protocol.dialects.ollama_request import OllamaPull, read_ollama_request
from ....protocol.errors import InvalidRequestError, OverloadedError, UpdraftError
from ....protocol.http import sse
from ....protocol.http.wire import WireResponse
from ...factory import has_model_file, model_file
from ...router import Router
from ...tiers.local import EngineLocalTier
from ..routes.route import RequestContext, Route

EventEncoder = Callable[[dict[str, Any]], bytes]
_PROGRESS_S = 0.25  # seconds between progress events of a pull


class DeviceModel(msgspec.Struct):
    """A model on this device, or a known model that can be pulled."""

    name: str
    # `ready`, `partial`, `damaged`, `missing`, or `known` (can be pulled).
    state: str
    # File size in bytes.
    size: int
    source: str = ""
    licence: str | None = None
    # Memory needed in bytes; None if the model is not ready or the file is unreadable.
    memory: int | None = None
    # Whether the model is running or fits into free memory; None if `memory` is None.
    fits: bool | None = None
    running: bool = False


class DeviceModels(msgspec.Struct):
    """Models of this device, and the memory available for them."""

    models: list[DeviceModel]
    # Memory free for models, in bytes.
    free_memory: int
    # Whether the running model is loaded, and whether it stays loaded when idle.
    loaded: bool
    pinned: bool


class PullRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A model to pull: a known name such as `smollm2`, `hf:owner/repo[:file or tag]`, or `pypi:package`."""

    model: Annotated[str, msgspec.Meta(max_length=300)]


class MemoryRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to unload (`sleep`), keep in memory (`pin`) or `unpin` the running model."""

    action: Literal["sleep", "pin", "unpin"]


class RemovedModel(msgspec.Struct):
    """A deleted model."""

    name: str
    # Disk space freed, in bytes.
    freed: int


async def list_models(context: RequestContext) -> WireResponse:
    await context.router.start()
    return WireResponse.json(await asyncio.to_thread(_listed, context.router))


async def pull(context: RequestContext) -> WireResponse:
    wanted = decode(context.request.body, PullRequest).model
    return WireResponse(200, sse.HEADERS, _begin(context.router, wanted, sse.event, sse.DONE))


async def pull_as_ollama(context: RequestContext) -> WireResponse:
    asked = read_ollama_request(read_object(context.request.body), OllamaPull)
    if asked.stream:
        return WireResponse(200, {"content-type": CONTENT_TYPE}, _begin(context.router, asked.wanted, pull_line))
    async with aclosing(_begin(context.router, asked.wanted, msgspec.json.encode)) as events:
        last = msgspec.json.decode([event async for event in events][-1])
    return WireResponse.json(last, status=502) if "error" in last else WireResponse.json({"status": "success"})


def _begin(router: Router, wanted: str, encode: EventEncoder, end: bytes = b"") -> AsyncGenerator[bytes]:
    """Start to pull a model, and return the progress events. Raises InvalidRequestError and OverloadedError."""
    from ....local_engine.store.known_models import KNOWN_MODELS
    from ....model_files.download.hub import endpoint
    from ....model_files.download.naming import parse

    if wanted not in KNOWN_MODELS and not wanted.startswith(("hf:", "pypi:")):
        raise InvalidRequestError(
            f"model must be one of {', '.join(KNOWN_MODELS)}, hf:owner/repo or pypi:package. `updraft pull` also takes "
            "URLs and files.",
            param="model",
            code="invalid_value",
        )
    if wanted not in KNOWN_MODELS:
        parse(wanted, endpoint())  # refuses a malformed name before the answer starts
    if router.pulling.locked():
        raise OverloadedError("Two models are already being pulled. Wait for one to finish.")
    return _pulling(wanted, router.pulling, encode, end)


async def remove(context: RequestContext) -> WireResponse:
    from ....local_engine.store.library import Library

    name, library = context.parameters["name"], Library()
    if _is_running(context.router, library.path(name)):
        raise InvalidRequestError(f"{name} is the running model. Choose another first.", param="name", code="in_use")
    return WireResponse.json(RemovedModel(name, await asyncio.to_thread(library.remove, name)))


async def memory(context: RequestContext) -> WireResponse:
    await context.router.start()
    action = decode(context.request.body, MemoryRequest).action
    tier = context.router.tiers.local
    if not isinstance(tier, EngineLocalTier):
        raise InvalidRequestError("No model is running on this device.", param="action", code="invalid_value")
    if action == "sleep":
        await tier.sleep()
    else:
        tier.pin(action == "pin")
    return WireResponse.json(await asyncio.to_thread(_listed, context.router))


def _listed(router: Router) -> DeviceModels:
    from ....local_engine.machine.machine import this_machine
    from ....local_engine.machine.memory_fit import free_memory
    from ....local_engine.store.known_models import KNOWN_MODELS
    from ....local_engine.store.library import Library

    library, machine = Library(), this_machine()
    free = max(0, free_memory(machine))
    models = [
        DeviceModel(
            each.name,
            each.state,
            each.size,
            each.source,
            None if each.manifest is None else each.manifest.licence,
            running=_is_running(router, library.path(each.name)),
        )
        for each in library.entries()
    ]
    for model in models:
        if model.state == "ready":
            model.memory = _memory_of(library.path(model.name))
            model.fits = None if model.memory is None else model.running or model.memory <= free
    here = {model.name for model in models}
    models += [
        DeviceModel(name, "known", known.size, str(known.place), known.licence)
        for name, known in KNOWN_MODELS.items()
        if name not in here
    ]
    tier = router.tiers.local
    idle = tier if isinstance(tier, EngineLocalTier) else None
    return DeviceModels(
        models,
        free,
        loaded=tier is not None if idle is None else idle.loaded,
        pinned=tier is not None if idle is None else idle.pinned,
    )


def _memory_of(path: Path) -> int | None:
    from ....local_engine.machine.memory_fit import DEFAULT_CELLS, MemoryPlan, estimate
    from ....model_files.gguf_reader import read_header

    try:
        return estimate(read_header(path), MemoryPlan(DEFAULT_CELLS)).total
    except UpdraftError:
        return None


def _is_running(router: Router, path: Path) -> bool:
    return has_model_file(router.config) and model_file(router.config) == path


@dataclass(slots=True)
class _Progress:
    """Progress of a pull, updated by the pulling thread."""

    # Bytes received.
    done: int = 0
    # Total size in bytes; None if unknown.
    total: int | None = None
    # Latest message for the user.
    message: str = ""
    # True once the client has disconnected.
    stopped: bool = False

    def progress(self, done: int, total: int | None) -> None:
        self.done, self.total = done, total
        if self.stopped:
            raise UpdraftError("The pull was stopped. Pull again to resume.")

    def say(self, line: str) -> None:
        self.message = line


async def _pulling(wanted: str, pulling: asyncio.Semaphore, encode: EventEncoder, end: bytes) -> AsyncGenerator[bytes]:
    """Yield events with `done` and `total` bytes, then `name` or `error`. Closing the stream stops the pull."""
    progress = _Progress()
    await pulling.acquire()
    task = asyncio.create_task(asyncio.to_thread(_pull, wanted, progress))
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # keep asyncio from logging the error
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_PROGRESS_S)
            yield encode({"done": progress.done, "total": progress.total, "message": progress.message})
        try:
            yield encode({"name": task.result()})
        except UpdraftError as error:
            yield encode(error.to_body())
        if end:
            yield end
    finally:
        progress.stopped = True
        pulling.release()


def _pull(wanted: str, progress: _Progress) -> str:
    from ....local_engine.store.find import find
    from ....local_engine.store.library import Library
    from ....local_engine.store.pull import pull as fetch
    from ....model_files.download.progress import ProgressReport

    report = ProgressReport(progress.progress, progress.say)
    return fetch(Library(), find(wanted, report=report), report=report).name


ROUTES = (
    Route("GET /updraft/models", list_models, "this device's models and their memory", response_type=DeviceModels),
    Route("POST /updraft/models/pull", pull, "pull a model; events report progress", PullRequest, streams=True),
    Route("POST /api/pull", pull_as_ollama, "pull a model, in Ollama's API", OllamaPull, streams=True),
    Route("POST /updraft/models/memory", memory, "`sleep`, `pin` or `unpin` the model", MemoryRequest, DeviceModels),
    Route("DELETE /updraft/models/{name}", remove, "delete a model that is not running", response_type=RemovedModel),
)
