"""Inside a package, modules import from lower layers only; no import cycles; at most twenty files in a folder."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from import_graph import LAYERS, ROOT, imports_of, sources

#: The layers of each package, top layer first. Subpackages and modules of one layer may import each other.
SUBPACKAGES = {
    "protocol": [
        "dialects",
        "http",
        "embeddings requests responses",
        "decoding telemetry",
        "safety",
        "prompts structured sampling settings",
        "errors hints schemas turns unicode_forms validation_messages",
    ],
    "text": [
        "echoed_prompt tokenization tool_calls tagged_calls tagged_grammar tool_formats tool_stream",
        "grammars",
        "tokenizer",
        "chat",
        "templates",
        "detokenize logit_edits repetition fair_queue sandbox control_tokens",
    ],
    "kernels": ["decoder", "attention experts", "activation kv_cache linear lora norm sampling", "runtime"],
    "accounting": ["accounts", "budget ledger prices", "breaker reported_usage surcharges", "token_estimate"],
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
        "licences",
        "features",
        "graded_row target",
        "arrays optional_imports",
    ],
    "cloud_engine": ["deploy", "planning", "gateway", "node", "engine", "models"],
    "cloud_engine.deploy": [
        "launch",
        "local ray_cluster",
        "ray_deployments",
        "ray_machines",
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
        "ranks",
        "output",
        "speculation",
        "worker",
        "scheduling",
        "kv",
        "rank_messages",
        "types step",
        "config stats",
    ],
    "cloud_engine.planning": ["plan", "simulation", "mode_limits step_fit", "roofline step_time trace"],
    "cloud_engine.node": ["process", "api", "answers registration"],
    "cloud_engine.models": [
        "compile",
        "loading",
        "transformers_model",
        "families formats",
        "decoder",
        "experts latent_attention",
        "layers causal_model",
        "sharding",
        "config rope",
        "fields",
    ],
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
        "learning",
        "factory forecast",
        "responses",
        "cascade",
        "state",
        "conversations feedback tasks",
        "settings_sources",
        "config",
        "accounting storage",
        "gates",
        "tiers",
        "privacy",
        "request",
    ],
    "router.server.routes": [
        "messages ollama openapi",
        "openai",
        "route",
    ],
    "router.server": ["app", "chat_socket endpoints reload", "page", "routes", "answers batches"],
    "sdk": ["libraries", "client", "requests", "transport", "caller_keys runtime_pool", "runtime", "read_ahead"],
    "bench": ["cascade engine gateway gpu kernels live local router sdk", "shared"],
    "cli": [
        "reference",
        "main",
        "bench demo service",
        "calibrate cloud doctor evaluate init keys learn ledger plan policy route servers talk tasks top tune",
        "models shared",
        "bootstrap",
    ],
}
#: Folders with one file per task kind or model family: any number of files.
UNLIMITED = {"embedded/kinds", "cloud_engine/models/families"}
MAX_FILES = 20
#: Lines of all packages together; the goal is 45,000.
MAX_LINES = 93_240


def modules() -> set[str]:
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sources()}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The modules that each module imports, including imports inside functions and for types only."""
    known = modules()
    imports: dict[str, set[str]] = {name: set() for name in known}
    for path in sources():
        for import_ in imports_of(path):
            target = import_.target
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != import_.source:
                imports.setdefault(import_.source, set()).add(target)
    return imports


def upward_imports(package: str, layers: Iterable[str], imports: Mapping[str, set[str]]) -> list[str]:
    """Imports inside a package that go to a higher layer, and modules that have no layer."""
    layer_of = {name: layer for layer, names in enumerate(reversed(list(layers))) for name in names.split()}
    wrong: list[str] = []
    for source, targets in sorted(imports.items()):
        if not source.startswith(f"{package}."):
            continue
        here = source.removeprefix(f"{package}.").partition(".")[0]
        if here not in layer_of:
            wrong.append(f"{source} has no layer in SUBPACKAGES")
            continue
        for target in sorted(targets):
            there = target.removeprefix(f"{package}.").partition(".")[0]
            if target.startswith(f"{package}.") and here != there and layer_of.get(there, 99) > layer_of[here]:
                wrong.append(f"{source} imports {target}")
    return wrong


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_subpackages_import_from_lower_layers_only(package: str, graph: dict[str, set[str]]) -> None:
    assert upward_imports(package, SUBPACKAGES[package], graph) == []


def test_in_a_kernel_package_ops_is_the_top_layer_and_types_the_lowest(graph: dict[str, set[str]]) -> None:
    """Kernels import no dispatcher (`ops`), and `types` imports nothing from its own package."""
    wrong: list[str] = []
    for source, targets in sorted(graph.items()):
        if not source.startswith("kernels.") or source.count(".") < 2:
            continue
        operation, module = source.split(".")[1:3]
        for target in targets:
            imports_ops = target.startswith("kernels.") and target.endswith(".ops") and module != "ops"
            types_import = target.startswith(f"kernels.{operation}.") and module == "types"
            if imports_ops or types_import:
                wrong.append(f"{source} imports {target}")
    assert wrong == []


def test_upward_imports_and_missing_layers_are_found() -> None:
    imports = {"some.low.a": {"some.high.b", "some.low.c"}, "some.high.b": {"some.low.a"}, "some.new": set[str]()}
    assert upward_imports("some", ["high", "low"], imports) == [
        "some.low.a imports some.high.b",
        "some.new has no layer in SUBPACKAGES",
    ]


def test_every_package_with_subpackages_is_listed() -> None:
    nested = {package for package in LAYERS for path in (ROOT / package).iterdir() if list(path.glob("*.py"))}
    assert nested - set(SUBPACKAGES) == set()


def import_cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

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
                cycles.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return cycles


def test_there_are_no_import_cycles(graph: dict[str, set[str]]) -> None:
    assert import_cycles(graph) == []


def test_an_import_cycle_is_found() -> None:
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_folder_has_more_than_twenty_files() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in sources() if path.name != "__init__.py")
    crowded = {folder: count for folder, count in files.items() if count > MAX_FILES and folder not in UNLIMITED}
    assert crowded == {}


def test_the_package_does_not_grow() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources()) <= MAX_LINES


def test_public_class_names_are_unique() -> None:
    """A search for a class name leads to one package only."""
    packages: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                parts = path.relative_to(ROOT).parts
                package = "/".join(parts[: 2 if parts[0] == "cloud_engine" else 1])
                packages.setdefault(node.name, set()).add(package)
    assert {name: holders for name, holders in packages.items() if len(holders) > 1} == {}
