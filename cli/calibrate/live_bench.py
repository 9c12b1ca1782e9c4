"""Asks both tiers the questions of `updraft bench live`, with the code of `calibrate --live`, and measures the pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.errors import UpstreamError
from . import sources

if TYPE_CHECKING:
    from ...bench.live.measure import RecordedPair
    from ...classifier.grading.questions import Question
    from ...local_engine.engine import LocalEngine
    from ...router.config import RouterConfig


def measured(
    local: str, questions: Sequence[Question], seeds: int, answers: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the model `local` with a stub cloud that knows the answers. The file `answers` keeps local answers."""
    from ...bench.live.measure import measure, measure_engine
    from ...bench.live.stub_cloud import CLOUD_MODEL, stub_cloud
    from ...router.config import RouterConfig
    from ...router.factory import open_local
    from ..shared import options

    with stub_cloud({question.prompt: question.answer for question in questions}) as url:
        config = RouterConfig(local=local, cloud_url=url, cloud_model=CLOUD_MODEL)
        with options.with_cloud(config, say), open_local(config) as engine:
            say(f"Both tiers answer {len(questions)} questions ...")
            pair = answered(config, engine, questions, answers)
            figures = measure(pair, seeds, say)
            say("The model answers the other half again, through the router ...")
            return figures | {"engine": measure_engine(pair, engine)}


def answered(config: RouterConfig, engine: LocalEngine, questions: Sequence[Question], answers: Path) -> RecordedPair:
    """Return both tiers' graded answers. Raises UpstreamError unless every question has a graded row."""
    from ...bench.live.measure import RecordedPair
    from ...classifier.grading.grader import PairGrader
    from ...classifier.grading.questions import Prompt
    from ...router.tiers.local import EngineLocalTier
    from .saved_answers import SavedAnswers
    from .spending import Spending

    prompts = [Prompt(question.id, question.kind, question.prompt, question.grade) for question in questions]
    spending = Spending(config.prices, None, [config.cloud_model])
    with closing(SavedAnswers(answers)) as saved:
        asking = sources.LiveSetup(config, sources.JudgeOptions(), PairGrader(), spending)
        live = asyncio.run(sources.ask_both(asking, EngineLocalTier(engine), saved, prompts, lambda: None))
    if len(live.rows) < len(prompts):
        raise UpstreamError(f"{len(prompts) - len(live.rows)} questions got no answer: {live.failures[:1]}")
    return RecordedPair(config, engine.model_id, questions, live.rows)
