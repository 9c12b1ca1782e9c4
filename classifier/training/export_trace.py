"""Write a fitted gate as one ONNX graph, features in and P(gain) out.

skl2onnx converts the trees, the rest is explicit nodes. The linear parts and the calibration run in double precision,
so that the graph and the Python model agree to about 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ..calibration.probability_curve import ProbabilityCurve
from ..optional import load_module
from ..policy.graph_files import ML_OPSET, OPSET
from .experts import GateModel, LinearExpert, TreeExpert

INPUT, OUTPUT = "features", "p_gain"


def to_onnx(model: GateModel) -> bytes:
    """The serialised graph: `features` (n, width) float32 -> `p_gain` (n,) float32 in [0, 1]."""
    graph = Graph()
    score = graph.constant("start", np.zeros((1, 1)))
    for i, (expert, weight) in enumerate(zip(model.experts, model.weights, strict=True)):
        raw = graph.expert(f"expert{i}", expert)
        score = graph.node("Add", score, graph.node("Mul", raw, graph.constant(f"weight{i}", np.array([[weight]]))))
    return graph.finish(
        graph.curve(score, model.curve),
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["n", model.layout.width])],
    )


class Graph:
    """Collects nodes and constants. Every method returns the name of a (n, k) double tensor."""

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

    def expert(self, name: str, expert: Any) -> str:
        if isinstance(expert, TreeExpert):
            return self._trees(expert)
        if isinstance(expert, LinearExpert):
            return self._linear(name, expert)
        raise TypeError(f"no ONNX form for {type(expert).__name__}")

    def _trees(self, expert: TreeExpert) -> str:
        node = _tree_node(expert)
        raw = f"t{next(self._ids)}"
        node.input[:] = [INPUT]
        node.output[:] = [f"{raw}_label", raw]
        node.name = raw
        self._nodes.append(node)
        # Two columns, minus and plus the log-odds.
        positive = self.node("Gather", raw, self.constant(f"{raw}_one", np.array([1], np.int64)), axis=1)
        return self.node("Cast", positive, to=TensorProto.DOUBLE)

    def _linear(self, name: str, expert: LinearExpert) -> str:
        columns = self.constant(f"{name}_columns", np.array(expert.columns, np.int64))
        x = self.node("Cast", self.node("Gather", INPUT, columns, axis=1), to=TensorProto.DOUBLE)
        centred = self.node("Sub", x, self.constant(f"{name}_mean", expert.mean[None]))
        scaled = self.node("Div", centred, self.constant(f"{name}_scale", expert.scale[None]))
        low = self.constant(f"{name}_low", np.array(-expert.clip))
        high = self.constant(f"{name}_high", np.array(expert.clip))
        clipped = self.node("Clip", scaled, low, high)
        product = self.node("MatMul", clipped, self.constant(f"{name}_weights", expert.weights[:, None]))
        return self.node("Add", product, self.constant(f"{name}_bias", np.array([[expert.bias]])))

    def curve(self, score: str, curve: ProbabilityCurve) -> str:
        """The calibrated probability of a (n, 1) score."""
        offset = self.node("Sub", score, self.constant("curve_starts", curve.starts[None]))
        part = self.node("Div", offset, self.constant("curve_widths", curve.widths[None]))
        zero, one = self.constant("zero", np.array(0.0)), self.constant("one", np.array(1.0))
        risen = self.node(
            "MatMul", self.node("Clip", part, zero, one), self.constant("curve_rises", curve.rises[:, None])
        )
        return self.node(
            "Clip", self.node("Add", risen, self.constant("curve_low", np.array([[curve.low]]))), zero, one
        )

    def unless_known(self, known: str, make: Callable[[], str]) -> str:
        """The float matrix that the nodes of `make` compute; or `known`, an input, where that is not empty: then these
        nodes do not run.
        """
        outer, self._nodes = self._nodes, []
        computed = self._branch(make())
        self._nodes = []
        given = self._branch(self.node("Identity", known))
        self._nodes = outer
        empty = self.node("Equal", self.node("Size", known), self.constant("no_size", np.array(0)))
        name = f"t{next(self._ids)}"
        self._nodes.append(helper.make_node("If", [empty], [name], then_branch=computed, else_branch=given))
        return name

    def _branch(self, result: str) -> GraphProto:
        output = helper.make_tensor_value_info(result, TensorProto.FLOAT, [1, None])
        return helper.make_graph(self._nodes, f"{result}_branch", [], [output])

    def append(self, node: NodeProto) -> None:
        self._nodes.append(node)

    def finish(self, probability: str, inputs: Sequence[ValueInfoProto], also: Sequence[ValueInfoProto] = ()) -> bytes:
        """The model from `inputs` to `p_gain`, (n,) float32, and `also` further results."""
        flat = self.node("Reshape", probability, self.constant("flat", np.array([-1], np.int64)))
        self._nodes.append(helper.make_node("Cast", [flat], [OUTPUT], to=TensorProto.FLOAT))
        graph = helper.make_graph(
            self._nodes,
            "p_gain",
            inputs,
            [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["n"]), *also],
            self._constants,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="updraft")
        load_module("onnx.checker", "train").check_model(model)
        return model.SerializeToString(deterministic=True)


def _tree_node(expert: TreeExpert) -> NodeProto:
    """The ensemble as skl2onnx writes it, its feature numbers turned into columns of the gate's whole vector."""
    types = load_module("skl2onnx.common.data_types", "train")
    converted = load_module("skl2onnx", "train").to_onnx(
        expert.model,
        initial_types=[(INPUT, types.FloatTensorType([None, len(expert.columns)]))],
        options={id(expert.model): {"zipmap": False, "raw_scores": True}},
        target_opset={"": OPSET, "ai.onnx.ml": ML_OPSET},
    )
    found: list[NodeProto] = [node for node in converted.graph.node if node.op_type == "TreeEnsembleClassifier"]
    if len(found) != 1:
        raise RuntimeError(f"skl2onnx wrote {len(found)} tree ensembles for one model")
    for attribute in found[0].attribute:
        if attribute.name == "nodes_featureids":
            attribute.ints[:] = [expert.columns[i] for i in attribute.ints]
    return found[0]
