"""Write a text router as one ONNX graph: one question's counts and measures in, P(gain) out.

Only buckets that hold something go in: a question of 200 characters fills a twentieth of them, one of 2,000 a fifth.
Of a cascade's graph the part that reads the question can run alone, and the rest without it.

Sums run in double precision and are rounded where Python rounds them, and thresholds of trees are rounded down to the
next single-precision number, so that no row can take another branch than in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from ..features.text_vectors import Mode
from ..features.wording import COUNTS
from ..policy.text_gate import BUCKET_COUNTS, BUCKETS, MEASURES, READ, TOPICS
from .export_trace import Graph
from .text_router import Forest, Ridge, TextRouter

__all__ = ["router_to_onnx"]


def router_to_onnx(router: TextRouter, n_measures: int, mode: Mode) -> bytes:
    """`buckets` (m,) int64, their `counts` (m,) and `measures` (1, n_measures) float32 -> `p_gain` (1,) float32.

    In a cascade also `topics` (1, k) float32 -> `read` (1, 50) float32, the question's topics: computed from its
    buckets where k is 0, else those given. Raises TypeError for a router with a member that does not ship.
    """
    graph = Graph()
    inputs = [
        helper.make_tensor_value_info(BUCKETS, TensorProto.INT64, ["m"]),
        helper.make_tensor_value_info(BUCKET_COUNTS, TensorProto.FLOAT, ["m"]),
        helper.make_tensor_value_info(MEASURES, TensorProto.FLOAT, [1, n_measures]),
    ]
    if mode != "cascade":
        return graph.finish(_probability(graph, router, _topics(graph, router)), inputs)
    known = graph.unless_known(TOPICS, lambda: _topics(graph, router))
    graph.append(helper.make_node("Identity", [known], [READ]))
    return graph.finish(
        _probability(graph, router, known),
        [*inputs, helper.make_tensor_value_info(TOPICS, TensorProto.FLOAT, [1, "k"])],
        [helper.make_tensor_value_info(READ, TensorProto.FLOAT, [1, router.topics.directions.shape[1]])],
    )


def _topics(graph: Graph, router: TextRouter) -> str:
    """(1, 50) float32 of the question."""
    # Widened behind the picking of rows: reading them takes longer, and a wider table would be twice as much to read.
    directions = graph.constant("directions", router.topics.directions.astype(np.float32))
    rows = graph.node("Cast", graph.node("Gather", directions, BUCKETS, axis=0), to=TensorProto.DOUBLE)
    topics = graph.node("MatMul", _weighted_words(graph, router), rows)
    flat = graph.node("Reshape", topics, graph.constant("one_row", np.array([1, -1], np.int64)))
    return graph.node("Cast", flat, to=TensorProto.FLOAT)


def _probability(graph: Graph, router: TextRouter, topics: str) -> str:
    dense = graph.node("Concat", topics, MEASURES, axis=1)
    score = graph.constant("start", np.array([[router.bias]]))
    for name, weight in router.weights.items():
        raw = _member(graph, name, router.members[name], dense)
        score = graph.node("Add", score, graph.node("Mul", raw, graph.constant(f"{name}_weight", np.array([[weight]]))))
    return graph.curve(score, router.curve)


def _weighted_words(graph: Graph, router: TextRouter) -> str:
    """(m,) double: counts times term weights, words and characters each of unit length over the square root of two."""
    weights = graph.node("Gather", graph.constant("term_weights", router.topics.weights), BUCKETS, axis=0)
    weighted = graph.node("Mul", graph.node("Cast", BUCKET_COUNTS, to=TensorProto.DOUBLE), weights)
    squares = graph.node("Mul", weighted, weighted)
    is_word = graph.node("Less", BUCKETS, graph.constant("first_of_characters", np.array(COUNTS // 2)))
    none = graph.constant("none", np.array(0.0))
    lengths = [_length(graph, graph.node("Where", is_word, *parts)) for parts in ((squares, none), (none, squares))]
    return graph.node("Div", weighted, graph.node("Where", is_word, *lengths))


def _length(graph: Graph, squares: str) -> str:
    total = graph.node("ReduceSum", squares, keepdims=1)
    return graph.node("Sqrt", graph.node("Add", total, total))


def _member(graph: Graph, name: str, member: Any, dense: str) -> str:
    if isinstance(member, Ridge):
        return _ridge(graph, name, member, dense)
    if isinstance(member, Forest):
        graph.append(_forest(member, dense, f"{name}_gain"))
        return graph.node("Cast", f"{name}_gain", to=TensorProto.DOUBLE)
    raise TypeError(f"{type(member).__name__} has no ONNX form: it is there for comparison only")


def _ridge(graph: Graph, name: str, ridge: Ridge, dense: str) -> str:
    centred = graph.node(
        "Sub", graph.node("Cast", dense, to=TensorProto.DOUBLE), graph.constant(f"{name}_mean", ridge.mean[None])
    )
    scaled = graph.node("Div", centred, graph.constant(f"{name}_scale", ridge.scale[None]))
    low = graph.constant(f"{name}_low", np.array(-ridge.clip))
    clipped = graph.node("Clip", scaled, low, graph.constant(f"{name}_high", np.array(ridge.clip)))
    product = graph.node("MatMul", clipped, graph.constant(f"{name}_weights", ridge.weights[:, None]))
    return graph.node("Add", product, graph.constant(f"{name}_bias", np.array([[ridge.bias]])))


def _forest(forest: Forest, dense: str, output: str) -> NodeProto:
    """The ensemble as one node whose leaves hold the strong minus the weak score, over the number of trees."""
    nodes: dict[str, list[Any]] = {name: [] for name in ("tree", "id", "feature", "value", "mode", "yes", "no")}
    leaves: dict[str, list[Any]] = {name: [] for name in ("tree", "node", "weight")}
    trees = [estimator.tree_ for estimator in forest.model.estimators_]
    for i, tree in enumerate(trees):
        inner = tree.children_left >= 0
        nodes["tree"] += [i] * tree.node_count
        nodes["id"] += range(tree.node_count)
        nodes["feature"] += np.where(inner, tree.feature, 0).tolist()
        nodes["value"] += _rounded_down(np.where(inner, tree.threshold, 0.0))
        nodes["mode"] += np.where(inner, "BRANCH_LEQ", "LEAF").tolist()
        nodes["yes"] += np.where(inner, tree.children_left, 0).tolist()
        nodes["no"] += np.where(inner, tree.children_right, 0).tolist()
        at = np.flatnonzero(~inner)
        leaves["tree"] += [i] * len(at)
        leaves["node"] += at.tolist()
        leaves["weight"] += ((tree.value[at, 1, 0] - tree.value[at, 0, 0]) / len(trees)).tolist()
    return helper.make_node(
        "TreeEnsembleRegressor",
        [dense],
        [output],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=nodes["tree"],
        nodes_nodeids=nodes["id"],
        nodes_featureids=nodes["feature"],
        nodes_values=nodes["value"],
        nodes_modes=nodes["mode"],
        nodes_truenodeids=nodes["yes"],
        nodes_falsenodeids=nodes["no"],
        target_treeids=leaves["tree"],
        target_nodeids=leaves["node"],
        target_ids=[0] * len(leaves["tree"]),
        target_weights=leaves["weight"],
    )


def _rounded_down(thresholds: Any) -> list[float]:
    """Single-precision numbers t32 <= t: for single-precision x, `x <= t32` then says the same as `x <= t`."""
    single = np.asarray(thresholds, np.float32)
    above = single.astype(np.float64) > thresholds
    return np.where(above, np.nextafter(single, np.float32(-np.inf)), single).astype(np.float32).tolist()
