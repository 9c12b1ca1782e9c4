"""Hostile chat templates: their process is bounded and replaced, the next request is served, and none outlives us."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
from updraft.protocol.errors import EngineError, InvalidRequestError, ModelLoadError
from updraft.protocol.requests import Message
from updraft.text.chat import ChatTemplate
from updraft.text.templates.renderer import LIMIT_CODE, Renderer, RenderLimits
from waiting import wait_for

TIGHT = RenderLimits(cpu_seconds=0.3, memory_bytes=128 * 2**20)
ONE, TWO = [Message("user", "A")], [Message("user", "A"), Message("user", "B")]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="no other system limits a process's memory")


class Template:
    """A renderer that is given messages."""

    def __init__(self, source: str, limits: RenderLimits | None = None) -> None:
        renderer = self._renderer = Renderer(source, limits or RenderLimits())
        self.compile, self.close = renderer.compile, renderer.close

    def render(self, messages: list[Message]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        (text,) = self._renderer.render([{"messages": turns}])
        return text


def hostile(source: str, limits: RenderLimits = TIGHT) -> Template:
    """Harmless for one message, as a trial with one would not find it."""
    return Template("{% if messages | length > 1 %}" + source + "{% endif %}fine", limits)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def child_of(template: Template) -> psutil.Process:
    """The one that its compiling starts."""
    others = children()
    template.compile()
    (child,) = children() - others
    return child


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# Lists and tuples of 2**60 items, whose parts are the same. Python compares and hashes them in one step of C.
PILES = """{% set n = namespace(x=[1], y=[1], t=(1,)) %}{% for i in range(60) %}{%
    set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% set n.t = (n.t, n.t) %}{% endfor %}"""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in 'ab' recursive %}{% if loop.depth < 60 %}{{ loop('ab') }}{% endif %}{% endfor %}",
        "{{ ([range(9999) | list] * 9999) | map('sort') | map('length') | list }}",
        "{{ ([range(9999) | list] * 9999) | map('tojson') | map('length') | list }}",
        PILES + "{{ n.x == n.y }}",
        PILES + "{{ n.x in ([n.y] | reverse) }}",
        PILES + "{{ n.t in {1: 2} }}",
        PILES + "{{ {n.t: 1} }}",
        PILES + "{{ [n.x] | select('equalto', n.y) | list }}",
        PILES + "{% for each in [n.x, n.y] %}{{ loop.changed(each) }}{% endfor %}",
    ],
)
def test_a_template_gets_bounded_time(source: str) -> None:
    template = hostile(source)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"stopped: the template took more than 0.3 s") as caught:
            template.render(TWO)
        assert (caught.value.param, caught.value.code) == ("messages", LIMIT_CODE)
        assert template.render(ONE) == "fine"  # by the child's successor


@linux_only
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 20000000000 }}",
        "{{ [1] * 20000000000 }}",
        "{% set ns = namespace(s='a' * 16) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a' * 16) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'a' | center(3 * 10**9) }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ '%3000000000d' is odd }}",
        "{{ '{:>{}}'.format(1, 3000000000) }}",
        "{{ 'a\nb' | indent(2 * 10**9) }}",
        "{{ ('a' * 9000000).replace('a', 'b' * 100) }}",
        "{{ [[[1]]] | tojson(indent=10**9) }}",
        "{{ (5).to_bytes(3 * 10**9, 'big') }}",
        "{{ (range(99999) | list * 300) | sort }}",
        "{% set s %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    ],
)
def test_a_template_gets_bounded_memory(source: str) -> None:
    template = hostile(source, RenderLimits(cpu_seconds=10, memory_bytes=128 * 2**20))
    with pytest.raises(InvalidRequestError, match="stopped: the template takes more memory than 128 MB") as caught:
        template.render(TWO)
    assert caught.value.code == LIMIT_CODE
    assert template.render(ONE) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{% set s = 'a' * 100000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
        "{{ ['a' * 5000000, 'b' * 5000000] | tojson }}",
    ],
)
def test_a_template_writes_a_bounded_text(source: str) -> None:
    template = hostile(source, RenderLimits())
    with pytest.raises(InvalidRequestError, match="the output exceeds the size of the input by more than 8,388,608"):
        template.render(TWO)
    assert template.render(ONE) == "fine"


def test_user_text_is_separated_from_template_output() -> None:
    template = Template("{{ messages[0].content }}", RenderLimits(output_characters=100))
    assert len(template.render([Message("user", "é" * 100_000)])) == 100_000


def test_an_error_is_short() -> None:
    with pytest.raises(InvalidRequestError, match="aaa") as caught:
        Template("{{ raise_exception('a' * 100000) }}").render(ONE)
    assert len(caught.value.message) < 3000


@pytest.mark.parametrize("source", ["{{ 9 ** (9 ** 9) }}", "{{ (['a'] * 9999999) | join('bbbbbb') | length }}"])
def test_compiling_is_bounded(source: str) -> None:
    """Jinja computes with constants while it compiles."""
    with pytest.raises(ModelLoadError, match="chat template cannot be compiled: the template"):
        hostile(source).compile()


def test_a_template_that_takes_too_long_by_the_clock() -> None:
    limits = RenderLimits(cpu_seconds=1000, wall_seconds=5)
    template = hostile("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", limits)
    with pytest.raises(InvalidRequestError, match="stopped: the template did not finish within 5 s"):
        template.render(TWO)
    assert template.render(ONE) == "fine"


@linux_only
def test_a_crash_of_the_interpreter() -> None:
    """Tuples in tuples: Python hashes them without a look at its stack."""
    deeper = "{% for i in range(99999) %}{% set n.t = (n.t,) %}{% endfor %}"
    source = "{% set n = namespace(t=(1,)) %}" + deeper * 4 + "{{ {n.t: 1} }}"
    template = hostile(source, RenderLimits(cpu_seconds=60))
    with pytest.raises(InvalidRequestError, match="stopped: the rendering process exited with SIGSEGV"):
        template.render(TWO)
    assert template.render(ONE) == "fine"


def test_one_template_does_not_stand_before_another() -> None:
    forever = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    busy, other = hostile(forever, RenderLimits(cpu_seconds=1000, wall_seconds=1000)), Template("other")
    child = child_of(busy)
    refused: list[BaseException] = []

    def render() -> None:
        try:
            busy.render(TWO)
        except InvalidRequestError as error:
            refused.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    spent = child.cpu_times().user
    wait_for(lambda: child.cpu_times().user > spent)  # it computes
    assert other.render(ONE) == "other"
    assert thread.is_alive()
    child.kill()
    thread.join()
    assert "exited with SIGKILL" in str(refused[0])


def test_threads_take_turns() -> None:
    template = Template("{{ messages[0].content }}")
    wrong: list[str] = []

    def render(name: str) -> None:
        for i in range(50):
            text = template.render([Message("user", f"{name}-{i}")])
            wrong.extend([text] * (text != f"{name}-{i}"))

    threads = [threading.Thread(target=render, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_process_before_the_first_use() -> None:
    before = children()
    template = Template("x")
    assert children() == before
    template.render(ONE)
    assert len(children() - before) == 1


def test_idle_child_that_exited_is_replaced() -> None:
    template = Template("x")
    child = child_of(template)
    child.kill()
    wait_for(lambda: gone(child))
    assert template.render(ONE) == "x"


def test_a_process_ends_with_its_template() -> None:
    template = Template("x")
    child = child_of(template)
    template.close()
    assert not child.is_running()
    child = child_of(template)
    assert template.render(ONE) == "x"
    del template
    gc.collect()
    assert not child.is_running()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_with_its_parent(number: signal.Signals) -> None:
    code = "import sys; from updraft.text.chat import ChatTemplate; template = ChatTemplate('x')\n"
    code += "template.compile(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(number)
        wait_for(lambda: gone(child))


def test_child_sees_no_environment_or_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    template = Template("x")
    variables = child_of(template).environ()
    assert "a-secret" not in variables.values()
    assert variables["TZ"] == "Pacific/Auckland"


def test_deleted_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert Template("{{ messages[0].content }}").render(ONE) == "A"


def test_a_child_that_cannot_start_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template("x")
    for program in ("/bin/false", os.devnull):
        monkeypatch.setattr("sys.executable", program)
        with pytest.raises(EngineError, match="cannot be rendered"):
            template.render(ONE)
    monkeypatch.undo()
    assert template.render(ONE) == "x"


def test_a_template_is_no_longer_than_templates_are() -> None:
    with pytest.raises(ModelLoadError, match="2,000,000 characters; the limit is 262,144"):
        Renderer("x" * 2_000_000, RenderLimits())


def test_attempt_reports_each_context() -> None:
    renderer = Renderer("{% if a %}{{ raise_exception('no') }}{% endif %}{{ b + 1 }}", RenderLimits())
    refused, failed, fine = renderer.attempt([{"a": 1}, {}, {"b": 1}])
    assert (refused.failure, refused.why) == ("refused", "no")
    assert (failed.failure, fine.failure, fine.text) == ("refused", None, "2")


def test_arguments_of_calls_are_as_the_model_wrote_them() -> None:
    """Numbers that no 64 bits hold, and halves of surrogate pairs."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 123456789012345678901234}'}}]
    template = ChatTemplate(
        "{{ messages[0].content }}{% set f = messages[0].tool_calls[0].function %}"
        "{{ f.name }}{{ f.arguments | tojson }}"
    )
    message = msgspec.convert({"role": "assistant", "content": "\ud83d", "tool_calls": calls}, Message)
    assert template.render([message]) == '\ud83df{"n": 123456789012345678901234}'


def test_helpers_of_transformers() -> None:
    template = Template("{{ strftime_now('%Y') }} {{ {'a': '<é>'} | tojson }}{% generation %}!{% endgeneration %}")
    assert template.render([Message("user", "x")]) == f'{datetime.date.today().year} {{"a": "<é>"}}!'


def test_filters_give_what_has_a_length_and_can_be_written() -> None:
    """As in llama.cpp, where they give lists."""
    users = "messages | selectattr('role', 'equalto', 'user')"
    source = f"{{{{ {users} | length }}}}{{{{ {users} | map(attribute='content') | tojson }}}}"
    assert (
        Template(source).render([Message("user", "a"), Message("assistant", "b"), Message("user", "c")])
        == '2["a", "c"]'
    )
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        Template("{{ undefined_name | tojson }}").render([Message("user", "a")])


def test_block_whitespace_as_in_transformers() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    assert Template(source).render([Message("user", "x")]) == "x\n"


def test_filters_and_methods_keep_their_meaning() -> None:
    source = """{{ ['b', 'a'] | sort | join(', ') }}|{{ 'a-b'.split('-')[1] }}|{{ 'x' | center(3) }}|{{ '%02d' % 7 }}|{{
    '{:>3}'.format('y') }}|{{ 'a\nb' | indent(2) }}|{{ {'b': 1, 'a': [2]} | dictsort }}|{{ [1, 1, 2] | unique | list
    }}|{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('upper') | join('+') }}|{{
    ', '.join(['a', 'b'] | map('trim')) }}|{{ {'a': [1, 2]} | tojson(indent=1) }}|{{ ' a '.strip() | replace('a', 'b')
    }}|{{ messages[0].get('name', 'none') }}|{{ 'ab'[::-1] | title }}|{{ '5' | int + 1.5 }}|{{ 7 % 4 }}"""
    expected = "a, b|b| x |07|  y|a\n  b|[('a', [2]), ('b', 1)]|[1, 2]|HI|a, b|"
    expected += '{\n "a": [\n  1,\n  2\n ]\n}|b|none|Ba|6.5|3'
    assert Template(source).render([Message("user", "hi")]) == expected


def test_operators_keep_their_meaning() -> None:
    source = "{{ 1 + 2 }}{{ 3 * 4 }}{{ 2 ** 5 }}{{ 'a' + 'b' }}{{ 'a' * 3 }}{{ 1 ~ none ~ 'x' ~ messages[0].role }}"
    source += "{% for a in 'xyz' %}{{ a }}{{ loop.length }}{% if loop.last %}!{% endif %}{% else %}none{% endfor %}"
    assert Template(source).render([Message("user", "hi")]) == "31232abaaa1Nonexuserx3y3z3!"
