"""Sources of a calibration's graded rows: a file, live answers of both tiers, or requests that the router recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...protocol.errors import ConfigurationError, InvalidRequestError, UpstreamError
from ..shared import options, output

if TYPE_CHECKING:
    from ...classifier.arrays import Array
    from ...classifier.graded_row import GradedRow
    from ...classifier.grading.grader import PairGrader
    from ...classifier.grading.questions import Prompt
    from ...classifier.online.experience import Observation
    from ...classifier.policy.policy import Source
    from ...classifier.target import Target
    from ...router.config import RouterConfig
    from ...router.tiers.interfaces import LocalTier
    from .live_rows import LiveRows
    from .saved_answers import SavedAnswers
    from .spending import Spending


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """The user's judge model, and the budget of the calibration in US dollars."""

    model: str | None = None
    url: str | None = None
    key: str | None = field(default=None, repr=False)
    budget: float | None = None

    def config(self, config: RouterConfig) -> RouterConfig:
        """Return settings with the judge as the cloud model. A judge at another URL does not get the cloud's key."""
        assert self.model is not None
        own = self.url is None
        return replace(
            config,
            middle_tiers=(),
            cloud_model=self.model,
            cloud_url=config.cloud_url if own else self.url,
            cloud_api_key=self.key or (config.cloud_api_key if own else None),
            cloud_api_key_file=None,
        )


@dataclass(frozen=True, slots=True)
class LiveSetup:
    """Settings, judge, grader and budget of a calibration."""

    config: RouterConfig
    judging: JudgeOptions
    grader: PairGrader
    spending: Spending


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """Graded rows, and their source."""

    rows: list[GradedRow]
    models: dict[str, str]
    source: Source
    # How the rows were graded, in words.
    grading: str
    # Metrics for the policy's card.
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    # Lines to print after the description of the policy.
    notes: tuple[str, ...] = ()
    # Called after the policy was made, and after a failure or an interruption.
    done: Callable[[], None] = lambda: None
    stopped: Callable[[], None] = lambda: None


def from_file(data: Path, weak: str | None, strong: str | None, config: RouterConfig) -> CalibrationRun:
    from ...classifier.grading.graded_data import Columns, read_graded

    rows = read_graded(data, Columns(weak, strong))
    models = {"local": _model_id(config), "cloud": options.cloud_model_of(config)}
    return CalibrationRun(rows, models, _source(data, len(rows)), "the scores of the file")


def from_log(config: RouterConfig, log: Path, judging: JudgeOptions) -> CalibrationRun:
    """Return graded rows of recorded requests that have texts, were sampled at random and answered by both tiers."""
    from ...classifier.graded_row import GradedRow
    from ...classifier.grading.grader import PairGrader
    from ...classifier.online.experience import ExperienceStore
    from ...classifier.online.refit import representative_sample
    from ...router.feedback.collector import pair_name
    from .spending import Spending

    models = {"local": _model_id(config), "cloud": options.cloud_model_of(config)}
    if judging.model is not None:
        _check_allowed(config)
    with closing(ExperienceStore(log)) as experience:
        observations = experience.rows(pair_name(models))
        counts = experience.pairs()
    if not observations:
        known_pairs = ", ".join(f"{pair} ({n})" for pair, n in counts.items()) or "no pair"
        raise ConfigurationError(f"{log} has no requests of {pair_name(models)}. It holds requests of {known_pairs}.")
    even = [row for row, usable in zip(observations, representative_sample(observations), strict=True) if usable]
    rows = [row for row in even if row.messages is not None and row.answer is not None]
    _check_enough(
        len(rows),
        f"Of {len(observations)} judged answers, {len(even)} were sampled at random and graded; {len(rows)} of these "
        "have texts. Set shadow = true or exploration, and experience_text = true, and use the router first.",
    )
    spending = Spending(config.prices, judging.budget, [judging.model] if judging.model else [])
    asking = LiveSetup(config, judging, PairGrader(embed=_embedder()), spending)
    prompts = [_conversation(row) for row in rows]
    scores = asyncio.run(_replayed(asking, list(zip(rows, prompts, strict=True))))
    graded = [
        GradedRow(
            prompt.prompt,
            *pair,
            answer=row.answer,
            cloud_read=row.cloud_read,
            cloud_written=row.cloud_written,
            messages=tuple(prompt.messages),
        )
        for row, prompt, pair in zip(rows, prompts, scores, strict=True)
        if pair is not None
    ]
    _check_enough(len(graded), f"{len(rows) - len(graded)} of {len(rows)} recorded requests got no verdict.")
    source = _source(log, len(graded), "\n".join(sorted(row.id for row in rows)).encode())
    return CalibrationRun(graded, models, source, asking.grader.description(), _metrics(asking), _notes(asking))


def _conversation(row: Observation) -> Prompt:
    """Return the conversation of a recorded request as a `Prompt`, like the prompts of `--live`."""
    from ...classifier.features.gate_inputs import PromptView
    from ...classifier.grading.questions import Prompt

    wire = msgspec.json.decode(row.messages or "[]", type=tuple[dict[str, Any], ...])
    view = PromptView.of(Prompt(row.id, "log", "", wire=wire).messages)
    return Prompt(row.id, "log", view.text, wire=wire if len(wire) > 1 else ())


async def _replayed(asking: LiveSetup, pairs: list[tuple[Observation, Prompt]]) -> list[tuple[float, float] | None]:
    """Return each request's scores. Uses recorded scores where no judge is needed; None where the judge fails."""
    from ...classifier.grading.agreement import ComparableAnswer
    from ...classifier.grading.judge import JudgementError

    scores: list[tuple[float, float] | None] = []
    async with AsyncExitStack() as stack:
        await _open_judge(stack, asking)
        grader = asking.grader
        for row, prompt in pairs:
            local, cloud = ComparableAnswer(row.answer or ""), ComparableAnswer(row.reply or "")
            if not grader.reads(local, cloud):
                grader.graded["agreement"] += 1
                scores.append(row.pair_grades)
                continue
            try:
                scores.append(await grader.grade(prompt, local, cloud))
            except JudgementError:
                scores.append(None)
    return scores


def ask_tiers(config: RouterConfig, file: Path, n: int, judging: JudgeOptions) -> CalibrationRun:
    """Ask both tiers the first `n` prompts in `file`, and return the graded rows."""
    from ...classifier.grading.grader import PairGrader
    from ...classifier.grading.questions import read_prompts
    from ...router.factory import local_identity
    from ...router.privacy.rules import PrivacyRules
    from ..shared.console import Console
    from ..shared.watch import Watch
    from .saved_answers import SavedAnswers, prompt_key, saved_answers_file
    from .spending import Spending

    available = read_prompts(file)
    if len(available) < n:
        raise InvalidRequestError(f"{file} has {len(available)} prompts, but --live asks for {n}.", param="live")
    _check_allowed(config)
    watch, rules = Watch(Console(stderr=True)), PrivacyRules(config.privacy)
    prompts = [
        prompt for prompt in available[:n] if all(rules.search(message.text) is None for message in prompt.messages)
    ]
    if len(prompts) < n:
        watch.say(f"{n - len(prompts)} of {n} prompts match a privacy rule and are not asked.")
    _check_enough(len(prompts))  # fail before any request costs money
    if (needed := _prompts_for_promise(config.target)) > len(prompts):
        watch.say(
            f"{config.target} needs at least {needed} graded prompts, but this run has {len(prompts)}. With too few "
            "prompts, every request escalates."
        )
    with options.with_cloud(config, watch.say) as running:
        if running.cloud_url is None:
            raise ConfigurationError("No cloud is configured: name one with --cloud-url.", param="cloud_url")
        models = {"local": _model_id(running), "cloud": running.cloud_model}
        saved = SavedAnswers(saved_answers_file(models, local_identity(running)))
        try:
            names = [running.cloud_model, *([judging.model] if judging.model else [])]
            spending = Spending(running.prices, judging.budget, names, spent=saved.spent, on_spent=saved.spend)
            before = sum(prompt_key(prompt.body) in saved.pairs for prompt in prompts)
            if before:
                watch.say(f"{before} of {len(prompts)} prompts were answered before and are not asked again.")
            asking = LiveSetup(running, judging, PairGrader(embed=_embedder()), spending)
            with watch.stage("both tiers", len(prompts)) as advance:
                rows = asyncio.run(_asked(asking, saved, prompts, lambda: advance("")))
            _check_rows(rows, len(prompts), watch.say)
        except BaseException:
            _stopped(saved)
            raise
    return CalibrationRun(
        rows.rows,
        models,
        _source(file, len(rows.rows)),
        asking.grader.description(),
        _metrics(asking),
        _notes(asking, asked_cloud=True),
        done=saved.remove,
        stopped=partial(_stopped, saved),
    )


async def _asked(
    asking: LiveSetup, saved: SavedAnswers, prompts: list[Prompt], on_done: Callable[[], None]
) -> LiveRows:
    from ...router.factory import open_local_tier

    local = await open_local_tier(asking.config)
    try:
        return await ask_both(asking, local, saved, prompts, on_done)
    finally:
        await local.aclose()


async def ask_both(
    asking: LiveSetup, local: LocalTier, saved: SavedAnswers, prompts: list[Prompt], on_done: Callable[[], None]
) -> LiveRows:
    from .live_rows import TierPair, cloud_model

    async with AsyncExitStack() as stack:
        cloud = await stack.enter_async_context(cloud_model(asking.config, asking.spending))
        await _open_judge(stack, asking)
        return await TierPair(local, cloud, asking.grader, saved).rows(prompts, on_done)


async def _open_judge(stack: AsyncExitStack, asking: LiveSetup) -> None:
    """Set the grader's judge if the user named a judge model; the stack closes the judge."""
    if asking.judging.model is None:
        return
    from ...classifier.grading.judge import PairwiseJudge, VerdictCache
    from ...protocol.settings import state_folder
    from .live_rows import cloud_model

    cache = stack.enter_context(closing(VerdictCache(state_folder() / "verdicts.sqlite3")))
    judge = asking.judging.config(asking.config)
    if judge.cloud_url is None:
        raise ConfigurationError("The judge has no server: name its endpoint with --judge-url.")
    judge_client = await stack.enter_async_context(cloud_model(judge, asking.spending))
    asking.grader.judge = PairwiseJudge(judge.cloud_model, judge_client.verdict, cache)


def _embedder() -> Callable[[str], Array] | None:
    """Return the encoder that grades free text without a judge, opened on first use; None if it is not installed."""
    from ...classifier.features.sentence_embedding import SentenceEmbedder, is_installed

    opened = cache(SentenceEmbedder.open)
    return (lambda text: opened().embed(text)) if is_installed() else None


def _stopped(saved: SavedAnswers) -> None:
    saved.close()
    if saved.pairs:
        output.echo(
            f"{len(saved.pairs)} answered prompts are kept in {saved.path}: run the same command to resume.", err=True
        )


def _check_allowed(config: RouterConfig) -> None:
    """Raise ConfigurationError if the settings forbid sending every prompt to the cloud."""
    if config.offline:
        raise ConfigurationError("Cloud and judge cannot be asked: set offline to false.", param="offline")
    limits = (config.budget, config.budget_per_key, config.budget_per_user)
    if any(limit.cloud_share is not None and limit.cloud_share < 1 for limit in limits):
        raise ConfigurationError(
            "Calibration asks cloud or judge about every prompt: set cloud_share of all budgets to 1 until it is done.",
            param="budget.cloud_share",
        )


def _check_rows(live: LiveRows, count: int, say: Callable[[str], None]) -> None:
    """Report prompts without a graded row. Raise UpstreamError if there are no rows, InvalidRequestError if too few."""
    shown = "; ".join(live.failures[:3])
    if not live.rows and not live.unasked:
        raise UpstreamError(f"No prompt was answered by both tiers: {shown}")
    why = f"{len(live.rows)} of {count} prompts are answered and graded"
    if live.unasked:
        why += f"; {live.unasked} were not asked: {live.budget}. Raise --budget and run the same command to resume"
    _check_enough(len(live.rows), f"{why}. {shown}".strip())
    if live.failures:
        say(f"{len(live.failures)} of {count} prompts failed and are left out of the policy: {shown}")
    if live.unasked:
        say(f"{live.unasked} of {count} prompts were not asked: {live.budget}.")


def _prompts_for_promise(target: Target) -> int:
    """Return the number of prompts that a promised quality needs; 0 for other targets, which need no minimum."""
    from ...classifier.training.gates import prompts_to_promise

    promises = target.name == "quality" and target.promise != "mean" and target.value < 1
    return prompts_to_promise(target.value) if promises else 0


def _check_enough(rows: int, why: str = "") -> None:
    from ...classifier.training.router_model import MIN_LABELS

    if rows < MIN_LABELS:
        message = f"A policy needs at least {MIN_LABELS} graded prompts, not {rows}."
        raise InvalidRequestError(f"{message} {why}".strip(), param="live")


def _notes(asking: LiveSetup, *, asked_cloud: bool = False) -> tuple[str, ...]:
    """Return lines on the judge's results and on the cost. `asked_cloud`: report the cost even without a judge."""
    judge, spending, lines = asking.grader.judge, asking.spending, list[str]()
    if judge is not None:
        counts = judge.counts
        lost = counts.unreadable + counts.unreachable + counts.hostile
        lines.append(
            f"The judge {judge.model} compared {counts.judged} pairs; {counts.disagreed} are ties, because it "
            f"disagreed with itself in reversed order. {lost} got no verdict: {counts.unreadable} unreadable replies, "
            f"{counts.unreachable} failures of the judge, {counts.hostile} answers that address the judge."
        )
    if asked_cloud or judge is not None:
        read, written = spending.tokens
        dollars = f"${spending.spent:.4f}" if spending.known else "an unknown sum (no prices)"
        lines.append(f"The calls read {read} tokens, wrote {written} tokens and cost {dollars}.")
    return tuple(lines)


def _metrics(asking: LiveSetup) -> dict[str, float]:
    grader, spending = asking.grader, asking.spending
    metrics: dict[str, float] = {f"grading.{name}": count for name, count in grader.graded.items()}
    if grader.judge is not None:
        counts = grader.judge.counts
        names = ("judged", "disagreed", "retried", "cached", "unreadable", "unreachable", "hostile")
        metrics |= {f"judge.{name}": getattr(counts, name) for name in names}
        if grader.matching is not None:
            metrics["judge.matching" if grader.embed is None else "judge.matching_embedding"] = grader.matching
    if spending.known and spending.spent:
        metrics["grading.usd"] = spending.spent
    return metrics


def _source(path: Path, rows: int, data: bytes | None = None) -> Source:
    from ...classifier.policy.graph_files import sha256
    from ...classifier.policy.policy import Source

    return Source(path.name, sha256(path.read_bytes() if data is None else data), rows)


def _model_id(config: RouterConfig) -> str:
    """Return the name of the local model. Raises ConfigurationError if its server gives no log-probabilities."""
    from ...router.factory import local_name, served_model

    served = served_model(config)
    if served is not None and not served.has_signals:
        raise ConfigurationError(
            f"The server {config.local} gives no log-probabilities for {served.name}, but a policy needs "
            "log-probabilities. Use llama-server, for example, or a model file.",
            param="local",
        )
    return local_name(config) if served is None else served.name
