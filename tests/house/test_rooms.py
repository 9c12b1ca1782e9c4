"""Inside a room folders import downwards only. Nothing imports in a circle. No folder has more than twenty files."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from import_graph import FLOORS, ROOT, imports_of, sources

#: The folders and modules of each room, from its top floor down. Those of one line may import each other.
ROOMS = {
    "protocol": [
        "dialects",
        "http",
        "embeddings requests responses",
        "decoding telemetry",
        "safety",
        "prompts structured sampling settings",
        "errors sampling_noise schemas sqlite unicode_forms",
    ],
    "text": [
        "tokenization tool_calls tool_formats tool_stream",
        "grammars",
        "tokenizer",
        "chat",
        "templates",
        "detokenize logit_edits repetition fair_queue sandbox control_tokens",
    ],
    "kernels": ["decoder", "attention", "activation kv_cache linear lora norm sampling", "runtime"],
    "accounting": ["accounts", "budget ledger prices", "breaker token_estimate"],
    "model_files": ["download", "gguf_reader identity sampling_defaults", "gguf_checks", "gguf_header"],
    "local_engine": [
        "tuning",
        "opening",
        "trial_load build_check",
        "engine",
        "model_identity runtime",
        "options",
        "llama",
        "store",
        "machine",
        "sampling",
    ],
    "classifier": [
        "online",
        "training",
        "evaluation",
        "policy",
        "grading",
        "calibration",
        "features",
        "graded_row target",
        "arrays optional_imports",
    ],
    "cloud_engine": ["deploy", "planning", "gateway", "node", "engine", "models"],
    "cloud_engine.deploy": [
        "launch",
        "local ray_cluster",
        "ray_deployments",
        "ray_llm servers",
        "config credentials",
        "autoscaling",
    ],
    "cloud_engine.gateway": [
        "process",
        "workers",
        "app",
        "metrics node_routes",
        "relay",
        "limits",
        "balancing",
        "ledger",
        "access",
        "upstream",
    ],
    "cloud_engine.engine": [
        "process",
        "engine",
        "output",
        "speculation",
        "execution",
        "scheduling",
        "kv",
        "types",
        "config stats",
    ],
    "cloud_engine.planning": ["plan", "simulation", "mode_limits step_fit", "step_time trace"],
    "cloud_engine.node": ["process", "api", "answers registration"],
    "cloud_engine.models": ["compile", "loading", "families", "decoder", "layers", "config rope", "fields"],
    "embedded": [
        "policy train",
        "export",
        "cards collect tokenizer",
        "tasks",
        "held_out kinds model phrasing pocket",
    ],
    "router": [
        "server",
        "router settings_checks",
        "factory model_names",
        "responses",
        "cascade",
        "state",
        "feedback",
        "settings_sources",
        "config",
        "accounting storage",
        "gates",
        "tiers",
        "privacy",
        "request",
    ],
    "router.server.routes": ["absent health messages metrics models ollama openapi requests", "openai", "route"],
    "router.server": ["app", "chat_socket endpoints reload", "page", "routes", "answers batches"],
    "sdk": ["libraries", "client", "requests", "transport", "caller_keys runtime_pool", "runtime", "read_ahead"],
    "bench": ["cascade engine gateway gpu kernels live local router sdk", "shared"],
    "cli": [
        "reference",
        "main",
        "bench demo service",
        "calibrate cloud doctor evaluate init keys learn ledger plan policy servers talk top tune",
        "models shared",
        "bootstrap",
    ],
}
#: Rooms whose parts are many of one kind.
UNLIMITED = {"embedded/kinds", "cloud_engine/models/families"}
MAX_FILES = 20
#: The package is to come down to 45,000 lines.
MAX_LINES = 81_040


def modules() -> set[str]:
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sources()}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Every module with those that it imports, also inside functions and for types only."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for path in sources():
        for import_ in imports_of(path):
            target = import_.target
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != import_.source:
                found.setdefault(import_.source, set()).add(target)
    return found


def upwards(room: str, floors: Iterable[str], imports: Mapping[str, set[str]]) -> list[str]:
    """Imports of a room that do not go down, and parts of it without a floor."""
    height = {part: floor for floor, parts in enumerate(reversed(list(floors))) for part in parts.split()}
    wrong: list[str] = []
    for source, targets in sorted(imports.items()):
        if not source.startswith(f"{room}."):
            continue
        here = source.removeprefix(f"{room}.").partition(".")[0]
        if here not in height:
            wrong.append(f"{source} has no floor in ROOMS")
            continue
        for target in sorted(targets):
            there = target.removeprefix(f"{room}.").partition(".")[0]
            if target.startswith(f"{room}.") and here != there and height.get(there, 99) > height[here]:
                wrong.append(f"{source} imports {target}")
    return wrong


@pytest.mark.parametrize("room", ROOMS)
def test_the_folders_of_a_room_import_downwards(room: str, graph: dict[str, set[str]]) -> None:
    assert upwards(room, ROOMS[room], graph) == []


def test_inside_an_operation_ops_is_the_top_and_types_the_bottom(graph: dict[str, set[str]]) -> None:
    """A dispatcher is asked from above only; types know nobody beside them."""
    wrong: list[str] = []
    for source, targets in sorted(graph.items()):
        if not source.startswith("kernels.") or source.count(".") < 2:
            continue
        operation, module = source.split(".")[1:3]
        for target in targets:
            into_ops = target.startswith("kernels.") and target.endswith(".ops") and module != "ops"
            beside = target.startswith(f"kernels.{operation}.") and module == "types"
            if into_ops or beside:
                wrong.append(f"{source} imports {target}")
    assert wrong == []


def test_an_import_that_goes_up_is_found() -> None:
    imports = {"room.low.a": {"room.high.b", "room.low.c"}, "room.high.b": {"room.low.a"}, "room.new": set[str]()}
    assert upwards("room", ["high", "low"], imports) == [
        "room.low.a imports room.high.b",
        "room.new has no floor in ROOMS",
    ]


def test_every_room_with_folders_has_floors() -> None:
    folders = {room for room in FLOORS for path in (ROOT / room).iterdir() if list(path.glob("*.py"))}
    assert folders - set(ROOMS) == set()


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that reach themselves, each circle once (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for target in imports[module]:
            if target not in order:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], order[target])
        if low[module] == order[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return found


def test_nothing_imports_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_folder_has_more_than_twenty_files() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in sources() if path.name != "__init__.py")
    crowded = {folder: count for folder, count in files.items() if count > MAX_FILES and folder not in UNLIMITED}
    assert crowded == {}


def test_the_package_does_not_grow() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources()) <= MAX_LINES


def test_a_public_class_has_a_name_of_its_own() -> None:
    """Two classes of one name in different rooms are one too many for whoever searches."""
    rooms: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                parts = path.relative_to(ROOT).parts
                room = "/".join(parts[: 2 if parts[0] == "cloud_engine" else 1])
                rooms.setdefault(node.name, set()).add(room)
    assert {name: found for name, found in rooms.items() if len(found) > 1} == {}
