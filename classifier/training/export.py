"""Export of a policy's models as ONNX graphs: one computes a question's topics, and one per gate computes P(gain).

The input is only the non-empty n-gram buckets, because most are empty: a question of 200 characters fills a twentieth
of all buckets, and one of 2,000 characters fills a fifth. The graphs must reproduce the Python models. Therefore sums
run in double precision and are rounded where Python rounds them, and tree thresholds are rounded down to the next
single-precision number, so that every row follows the same branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ..calibration.probability_curve import ProbabilityCurve
from ..features.wording import COUNTS
from ..optional_imports import load_module
from ..policy.exported_gates import BUCKET_COUNTS, BUCKETS, MEASURES, P_GAIN, TOPICS
from ..policy.graph_files import ML_OPSET, OPSET
from .router_model import Forest, Ridge, RouterModel, Topics


def topics_to_onnx(topics: Topics) -> bytes:
    """Export the graph from `buckets`, (m,) int64, and their `counts`, (m,) float32, to `topics`, (1, k) float32."""
    graph = Graph()
    # Gather before the cast to double, because memory reads take most of the time, and doubles are twice as large.
    directions = graph.constant("directions", topics.directions.astype(np.float32))
    rows = graph.node("Cast", graph.node("Gather", directions, BUCKETS, axis=0), to=TensorProto.DOUBLE)
    topic_row = graph.node("MatMul", _weighted_words(graph, topics), rows)
    inputs = [
        helper.make_tensor_value_info(BUCKETS, TensorProto.INT64, ["m"]),
        helper.make_tensor_value_info(BUCKET_COUNTS, TensorProto.FLOAT, ["m"]),
    ]
    size = topics.directions.shape[1]
    return graph.finish(topic_row, inputs, helper.make_tensor_value_info(TOPICS, TensorProto.FLOAT, [1, size]))


def gate_to_onnx(router: RouterModel, n_measures: int) -> bytes:
    """Export the graph from `topics`, (1, k), and `measures`, (1, n_measures), to `p_gain`, (1,); all float32."""
    graph = Graph()
    dense = graph.node("Concat", TOPICS, MEASURES, axis=1)
    score = graph.constant("start", np.array([[router.bias]]))
    for name, weight in router.weights.items():
        raw = _member(graph, name, router.members[name], dense)
        score = graph.node("Add", score, graph.node("Mul", raw, graph.constant(f"{name}_weight", np.array([[weight]]))))
    widths = {TOPICS: router.topics.directions.shape[1], MEASURES: n_measures}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width]) for name, width in widths.items()]
    output = helper.make_tensor_value_info(P_GAIN, TensorProto.FLOAT, [1])
    return graph.finish(graph.curve(score, router.curve), inputs, output)


class Graph:
    """Builder of an ONNX graph. Methods return the name of the node or constant that they add."""

    def __init__(self) -> None:
        self._ids = count()
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []

    def node(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"t{next(self._ids)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], domain=domain, **attributes))
        return name

    def constant(self, name: str, value: NDArray[Any]) -> str:
        self._constants.append(numpy_helper.from_array(value, name))
        return name

    def curve(self, score: str, curve: ProbabilityCurve) -> str:
        """Add the calibration curve, which converts an (n, 1) score to a probability."""
        offset = self.node("Sub", score, self.constant("curve_starts", curve.starts[None]))
        part = self.node("Div", offset, self.constant("curve_widths", curve.widths[None]))
        zero, one = self.constant("zero", np.array(0.0)), self.constant("one", np.array(1.0))
        risen = self.node(
            "MatMul", self.node("Clip", part, zero, one), self.constant("curve_rises", curve.rises[:, None])
        )
        return self.node(
            "Clip", self.node("Add", risen, self.constant("curve_low", np.array([[curve.low]]))), zero, one
        )

    def finish(self, result: str, inputs: Sequence[ValueInfoProto], output: ValueInfoProto) -> bytes:
        """Return the model from `inputs` to `output`, which is `result` reshaped and cast to float32."""
        shape = [dimension.dim_value or -1 for dimension in output.type.tensor_type.shape.dim]
        shaped = self.node("Reshape", result, self.constant("shape", np.array(shape, np.int64)))
        self._nodes.append(helper.make_node("Cast", [shaped], [output.name], to=TensorProto.FLOAT))
        graph = helper.make_graph(self._nodes, output.name, inputs, [output], self._constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="updraft")
        load_module("onnx.checker", "calibrate").check_model(model)
        return model.SerializeToString(deterministic=True)


def _weighted_words(graph: Graph, topics: Topics) -> str:
    """Add the weighted n-gram counts, (m,) double. Words and characters are each scaled to a length of 1/sqrt(2)."""
    weights = graph.node("Gather", graph.constant("term_weights", topics.weights), BUCKETS, axis=0)
    weighted = graph.node("Mul", graph.node("Cast", BUCKET_COUNTS, to=TensorProto.DOUBLE), weights)
    squares = graph.node("Mul", weighted, weighted)
    is_word = graph.node("Less", BUCKETS, graph.constant("first_of_characters", np.array(COUNTS // 2)))
    none = graph.constant("none", np.array(0.0))
    lengths = [_length(graph, graph.node("Where", is_word, *parts)) for parts in ((squares, none), (none, squares))]
    return graph.node("Div", weighted, graph.node("Where", is_word, *lengths))


def _length(graph: Graph, squares: str) -> str:
    total = graph.node("ReduceSum", squares, keepdims=1)
    return graph.node("Sqrt", graph.node("Add", total, total))


def _member(graph: Graph, name: str, member: Ridge | Forest, dense: str) -> str:
    if isinstance(member, Ridge):
        return _ridge(graph, name, member, dense)
    return graph.node("Cast", _forest(graph, member, dense), to=TensorProto.DOUBLE)


def _ridge(graph: Graph, name: str, ridge: Ridge, dense: str) -> str:
    centred = graph.node(
        "Sub", graph.node("Cast", dense, to=TensorProto.DOUBLE), graph.constant(f"{name}_mean", ridge.mean[None])
    )
    scaled = graph.node("Div", centred, graph.constant(f"{name}_scale", ridge.scale[None]))
    low = graph.constant(f"{name}_low", np.array(-ridge.clip))
    clipped = graph.node("Clip", scaled, low, graph.constant(f"{name}_high", np.array(ridge.clip)))
    product = graph.node("MatMul", clipped, graph.constant(f"{name}_weights", ridge.weights[:, None]))
    return graph.node("Add", product, graph.constant(f"{name}_bias", np.array([[ridge.bias]])))


def _forest(graph: Graph, forest: Forest, dense: str) -> str:
    """Add the trees as one node. Each leaf stores the strong minus the weak score, divided by the number of trees."""
    nodes: dict[str, list[Any]] = defaultdict(list)  # attributes of the ONNX node
    trees = [estimator.tree_ for estimator in forest.model.estimators_]
    for i, tree in enumerate(trees):
        inner = tree.children_left >= 0
        nodes["nodes_treeids"] += [i] * tree.node_count
        nodes["nodes_nodeids"] += range(tree.node_count)
        nodes["nodes_featureids"] += np.where(inner, tree.feature, 0).tolist()
        nodes["nodes_values"] += _rounded_down(np.where(inner, tree.threshold, 0.0))
        nodes["nodes_modes"] += np.where(inner, "BRANCH_LEQ", "LEAF").tolist()
        nodes["nodes_truenodeids"] += np.where(inner, tree.children_left, 0).tolist()
        nodes["nodes_falsenodeids"] += np.where(inner, tree.children_right, 0).tolist()
        at = np.flatnonzero(~inner)
        nodes["target_treeids"] += [i] * len(at)
        nodes["target_nodeids"] += at.tolist()
        nodes["target_weights"] += ((tree.value[at, 1, 0] - tree.value[at, 0, 0]) / len(trees)).tolist()
        nodes["target_ids"] += [0] * len(at)
    return graph.node("TreeEnsembleRegressor", dense, domain="ai.onnx.ml", n_targets=1, **nodes)


def _rounded_down(thresholds: Any) -> list[float]:
    """Round down to single precision, so that `x <= rounded` equals `x <= threshold` for any single-precision x."""
    single = np.asarray(thresholds, np.float32)
    above = single.astype(np.float64) > thresholds
    return np.where(above, np.nextafter(single, np.float32(-np.inf)), single).astype(np.float32).tolist()
