# SPDX-License-Identifier: Apache-2.0
"""The command ``plan``: rows, sweep, schedule, and what it says."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.diagnose.fake import Behaviour, Counters, FakeServer, exposition
from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.acceptance.model import Estimate
from vllm_kimi_eagle3.diagnose.drive import settled
from vllm_kimi_eagle3.diagnose.metrics import read_page
from vllm_kimi_eagle3.diagnose.run import OptionError
from vllm_kimi_eagle3.diagnose.server import Server
from vllm_kimi_eagle3.findings.catalogue import KINDS
from vllm_kimi_eagle3.planning import rows, run, schedule
from vllm_kimi_eagle3.planning.model import Model, Step
from vllm_kimi_eagle3.planning.schedule import Range, Release
from vllm_kimi_eagle3.planning.sweep import TOKENS, sweep

from .test_model import CELLS, HEALTHY, ROWS, TABLE, rows_of, truth

STEP_TIMES = ["--rows", str(ROWS)]
for one in ("vllm=0.26.0", "layers=61", "drafter=mla"):
    STEP_TIMES += ["--where", one]


def planned(*words: str) -> run.Plan:
    return run.plan(run.options_of(words))


def ids(plan: run.Plan) -> list[str]:
    return [finding.id for finding in plan.findings]


def csv_of(steps: list[Step], file: Path) -> Path:
    lines = [f"{s.k},{s.batch},{s.context:g},{s.seconds * 1e3}" for s in steps]
    file.write_text("\n".join(["k,batch,context,step_ms", *lines]))
    return file


# --------------------------------------------------------------------------------------------- rows


def test_rows_of_the_benchmark() -> None:
    where = {"vllm": "0.26.0", "layers": "61", "drafter": "mla"}
    found = rows.choose(rows.read_rows(ROWS), where)
    assert len(found) == 14
    assert {row.k for row in found} == {0, 3}
    assert all(row.seconds > 0 for row in found)


def test_rows_with_and_without_the_plugins_loop() -> None:
    where = {
        "vllm": "0.26.0", "layers": "61", "drafter": "llama", "backend": "TRITON_MLA", "tp": "1",
    }  # fmt: skip
    every = rows.read_rows(ROWS)
    for loop in ("on", "off"):
        found = rows.choose(every, {**where, "plugin_drafting": loop})
        # Steps without drafts are of either.
        assert sorted((row.k, row.batch) for row in found) == [
            (k, batch) for k in (0, 3) for batch in (1, 8, 32)
        ]
    with pytest.raises(ValueError, match="--where plugin_drafting=on"):
        rows.choose(every, where)


def test_rows_of_several_ranks() -> None:
    where = {"vllm": "0.26.0", "layers": "61", "drafter": "llama", "backend": "TRITON_MLA"}
    where |= {"plugin_drafting": "on", "ours": "on"}
    every = rows.read_rows(ROWS)
    with pytest.raises(ValueError, match=r"several configurations \(tp 1, 2\)"):
        rows.choose(every, where)
    two = rows.choose(every, {**where, "tp": "2"})
    assert {row.context for row in two} == {512.0, 8192.0, 30000.0}
    assert {row.k for row in two} == {0, 3}


def test_rows_of_several_configurations_are_not_mixed() -> None:
    every = rows.read_rows(ROWS)
    with pytest.raises(ValueError, match=r"several configurations \(vllm .*; layers "):
        rows.choose(every, {})
    with pytest.raises(ValueError, match="no such column; they have backend, drafter, gpu"):
        rows.choose(every, {"colour": "red"})
    with pytest.raises(ValueError, match="no row is left by --where"):
        rows.choose(every, {"vllm": "9"})
    # And what the table is.
    table = rows.read_rows(TABLE)
    with pytest.raises(ValueError, match="--where profile=DCP1"):
        rows.choose(table, {})
    assert len(rows.choose(table, {"profile": "DCP8"})) == 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no measured step"),
        ("{}\n[1]\n", "has no measured step"),
        ("a,b\n1,2\n", "row 2 has no k, batch and context"),
        ("k,batch,context,step_ms\n3,4,1000,fast\n", "row 2 has no"),
        ("k,batch,context,step_ms\n3,4,1000,-1\n", "row 2 has no"),
        ("k,batch,context,step_ms\n3,0.5,1000,1\n", "row 2 has no"),
        ("k,batch,context,step_ms\nnan,4,1000,1\n", "row 2 has no"),
        ('{"k": true, "batch": 1, "ctx": 1, "step_ms": 1}\n', "has no measured step"),
        ('{"k": 1, "batch": 1, "ctx": 1, "step": {"median": "x"}}\n', "has no measured step"),
    ],
)
def test_rows_that_are_none(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text(content)
    with pytest.raises(ValueError, match=words):
        rows.read_rows(file)


def test_the_same_file_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = csv_of(rows_of(truth(), CELLS[:4]), tmp_path / "rows.csv")
    (tmp_path / "link.csv").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    words = ["--rows", str(file), "--rows", "rows.csv", "--rows", "link.csv"]
    plan = planned(*words, "--acceptance", "76,56,43")
    assert plan.model is not None
    assert len(plan.model.rows) == 4
    assert plan.source == f"rows of {file}"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        planned("--rows", str(tmp_path / "x"), "--acceptance", "76,56,43")


@pytest.mark.parametrize("milliseconds", ["1e-320", "1e308", "inf", "nan"])
def test_times_that_no_server_takes(milliseconds: str, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text(f"k,batch,context,step_ms\n0,1,100,{milliseconds}\n")
    with pytest.raises(ValueError, match="row 2 has no"):
        rows.read_rows(file)


def test_whole_numbers_beyond_every_float(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    many = "9" * 400
    file.write_text(
        f'{{"k": 0, "batch": 1, "ctx": {many}, "step_ms": 5}}\n'
        f'{{"k": 0, "batch": 1, "ctx": 100, "step_ms": {many}}}\n'
        '{"k": 0, "batch": 1, "ctx": 100, "step_ms": 5}\n'
    )
    assert [row.seconds for row in rows.read_rows(file)] == [0.005]


def test_a_table_from_a_spreadsheet(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("\ufeffk, batch, context, step_ms\n0, 1, 100, 5\n")
    assert [(row.k, row.context, row.seconds) for row in rows.read_rows(file)] == [(0, 100, 0.005)]


def test_rows_without_number() -> None:
    one = rows.Row(0, 1, 100.0, 0.005, 0.0, ())
    assert len(rows.choose([one] * 4096, {})) == 4096
    with pytest.raises(ValueError, match="more than the model is fitted to"):
        rows.choose([one] * 4097, {})


# ------------------------------------------------------------------------------------- the schedule


def test_a_schedule_covers_every_batch() -> None:
    found = schedule.ranges(truth(), HEALTHY, 32_768, 3, 256)
    assert found[0].first == 1
    assert found[-1].last == 256
    assert all(a.last + 1 == b.first for a, b in pairwise(found))
    assert [one.k for one in found] == sorted((one.k for one in found), reverse=True)
    for one in found:
        for batch in (one.first, one.last):
            gains = [truth().gain(k, batch, 32_768, HEALTHY) for k in range(4)]
            assert gains[one.k] >= max(gains) * 0.98


def test_the_flags_are_what_vllm_takes() -> None:
    """Checked as vLLM's own validate_and_normalize_dynamic_sd_schedule does, 0.24 to 0.33."""
    flag = schedule.schedule_flag([Range(1, 16, 3), Range(17, 64, 1), Range(65, 256, 0)], "a/b")
    option, config = shlex.split(flag)
    assert option == "--speculative-config"
    found = json.loads(config)
    assert found["num_speculative_tokens"] == 3
    entries = found["num_speculative_tokens_per_batch_size"]
    assert entries == [[1, 16, 3], [17, 64, 1], [65, 256, 0]]
    assert entries[0][0] == 1
    assert all(0 < a <= b and k >= 0 for a, b, k in entries)
    assert schedule.schedule_flag([Range(1, 256, 0)]) == ""
    assert schedule.static_flag(0) == ""
    assert json.loads(shlex.split(schedule.static_flag(2, "it's"))[1])["model"] == "it's"


@pytest.mark.parametrize(
    ("release", "runner", "ranks", "takes", "said"),
    [
        ("0.17.1", "", 1, False, "plan-no-schedule"),
        ("0.23.0", "", 1, False, "plan-no-schedule"),
        ("0.24.0", "", 1, True, "plan-schedule-piecewise"),
        ("0.28.0", "", 1, True, "plan-schedule-piecewise"),
        ("0.28.0", "V2", 1, True, None),
        ("0.29.0", "", 1, True, None),
        ("0.33.0", "V1", 1, True, "plan-schedule-piecewise"),
        ("0.25.1", "", 2, False, "plan-schedule-data-parallel"),
        ("0.32.0", "", 4, False, "plan-schedule-data-parallel"),
        ("0.34.0.dev12+gabc", "", 1, True, None),
        ("", "", 1, False, None),
        ("a build", "", 1, False, None),
        ("1" * 5000, "", 1, False, None),
    ],
)
def test_what_each_release_does_with_a_schedule(
    release: str, runner: str, ranks: int, takes: bool, said: str | None
) -> None:
    found = Release.of(release, runner, ranks)
    assert found.takes_schedule is takes
    notes = list(schedule.notes(found, [Range(1, 8, 3), Range(9, 64, 0)]))
    assert [note.id for note in notes] == ([said] if said else [])
    assert not list(schedule.notes(found, [Range(1, 64, 3)])), "nothing changes with the batch"
    if said == "plan-schedule-data-parallel":
        assert ("hangs" in notes[0].fact) == (release < "0.26")


# ----------------------------------------------------------------------------------------- the plan


def test_from_rows_of_the_benchmark() -> None:
    plan = planned(*STEP_TIMES, "--acceptance", "76,56,43", "--vllm", "0.26.0")
    assert plan.exit_code == 0
    assert plan.static == 3
    assert plan.off is not None
    assert plan.off[0] < 0.06
    text = plan.as_text()
    assert '"num_speculative_tokens": 3' in text
    assert "tokens each" in text
    assert "0.26.0, V1 runner" in text
    found = json.loads(json.dumps(plan.as_json()))
    assert found["schema_version"] == 1
    assert len(found["gains"]) == 3 * 4 * 9
    assert {row["k"] for row in found["gains"]} == set(range(9))
    assert not next(row for row in found["gains"] if row["k"] == 4)["measured"]


def test_from_the_published_table() -> None:
    plan = planned("--rows", str(TABLE), "--where", "profile=DCP1", "--acceptance", "2.29@3",
                   "--vllm", "0.32.0", "--for-context", "32768")  # fmt: skip
    assert "plan-depends-on-context" in ids(plan)
    assert len(plan.ranges) > 1
    scheduled = json.loads(shlex.split(plan.flags[1])[1])
    assert scheduled["num_speculative_tokens_per_batch_size"][-1][1:] == [256, 0]
    short = planned("--rows", str(TABLE), "--where", "profile=DCP1", "--acceptance", "2.29@3",
                    "--vllm", "0.22.1")  # fmt: skip
    assert short.flags[1] == ""
    assert "plan-no-schedule" in ids(short)


def test_rows_of_tokens_a_second_need_acceptance() -> None:
    with pytest.raises(OptionError, match="give --acceptance"):
        planned("--rows", str(TABLE), "--where", "profile=DCP1")


def test_a_step_that_never_pays(tmp_path: Path) -> None:
    steps = [Step(k, b, 1000, 0.01 * (1 + 9 * (k > 0))) for k in (0, 3) for b in (1, 16)]
    file = csv_of(steps, tmp_path / "rows.csv")
    plan = planned("--rows", str(file), "--acceptance", "76,56,43")
    assert "plan-never-pays" in ids(plan)
    assert "Serve without speculation" in plan.as_text()
    near = [Step(k, b, 1000, 0.01 * (1 + 0.4 * (k > 0))) for k in (0, 3) for b in (1, 16)]
    plan = planned("--rows", str(csv_of(near, file)), "--acceptance", "76,56,43")
    assert "plan-never-pays" not in ids(plan)


def test_too_little_was_measured(tmp_path: Path) -> None:
    file = csv_of(rows_of(truth(), [(3, 1, 1000)]), tmp_path / "rows.csv")
    words = ("--acceptance", "40,15,5", "--batch", "1,64")
    plan = planned("--rows", str(file), *words)
    assert "plan-few-rows" in ids(plan)
    assert plan.exit_code == 2
    plan = planned("--rows", str(csv_of(rows_of(truth(), CELLS), file)), *words)
    assert "plan-few-rows" not in ids(plan)
    assert plan.exit_code == 0


def test_rows_that_no_model_fits(tmp_path: Path) -> None:
    noisy = [
        Step(s.k, s.batch, s.context, s.seconds * math.exp(0.8 * math.sin(7.0 * i)))
        for i, s in enumerate(rows_of(truth(), CELLS[::3]))
    ]
    plan = planned("--rows", str(csv_of(noisy, tmp_path / "rows.csv")), "--acceptance", "76,56,43")
    assert "plan-model-off" in ids(plan)
    fine = csv_of(rows_of(truth(), CELLS[::3]), tmp_path / "fine.csv")
    assert "plan-model-off" not in ids(planned("--rows", str(fine), "--acceptance", "76,56,43"))


def test_more_drafts_than_acceptance_is_known_for(tmp_path: Path) -> None:
    file = csv_of(rows_of(truth(), CELLS), tmp_path / "rows.csv")
    plan = planned("--rows", str(file), "--acceptance", "76,56,43", "--most", "8")
    assert "plan-acceptance-assumed" in ids(plan)
    plan = planned("--rows", str(file), "--acceptance", "76,56,43")
    assert "plan-acceptance-assumed" not in ids(plan)
    assert plan.static <= 3


def test_without_acceptance_there_is_no_plan(tmp_path: Path) -> None:
    file = csv_of(rows_of(truth(), CELLS), tmp_path / "rows.csv")
    plan = planned("--rows", str(file))
    assert ids(plan) == ["plan-no-input"]
    assert plan.exit_code == 2
    assert "There is no plan." in plan.as_text()
    plan = planned("--rows", str(file), "--drafter", "lightseekorg/kimi-k2.5-eagle3-mla")
    assert "published for" in plan.acceptance


def test_a_schedule_of_one_length_only(tmp_path: Path) -> None:
    steps = [Step(k, b, c, truth().seconds(k, b, 0)) for k, b, c in CELLS]
    plan = planned("--rows", str(csv_of(steps, tmp_path / "rows.csv")), "--acceptance", "76,56,43")
    assert "plan-depends-on-context" not in ids(plan)


def test_rows_of_one_cell_that_contradict_each_other(tmp_path: Path) -> None:
    """Nothing can be held out of them, and no model has both."""
    steps = [Step(0, 1, 100, 0.005), Step(3, 1, 100, 0.01), Step(3, 1, 100, 1.0)]
    plan = planned("--rows", str(csv_of(steps, tmp_path / "rows.csv")), "--acceptance", "76,56,43")
    assert "plan-model-off" in ids(plan)
    assert plan.exit_code == 2


def test_the_widest_interval_need_not_be_the_one_that_is_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With intervals of one's choice: at one batch drafts surely pay, by how much is open; at
    another it is open whether they do."""
    gains = {1: Estimate(1.0, 0.7, 1.3), 64: Estimate(4.0, 2.0, 8.0)}
    monkeypatch.setattr(Model, "speed_up", lambda self, k, batch, context, rates: gains[batch])
    file = csv_of(rows_of(truth(), CELLS), tmp_path / "rows.csv")
    words = ("--rows", str(file), "--acceptance", "76,56,43")
    plan = planned(*words, "--batch", "1,64")
    assert "a gain of 0.70 to 1.30" in next(
        finding.fact for finding in plan.findings if finding.id == "plan-few-rows"
    )
    assert "plan-few-rows" not in ids(planned(*words, "--batch", "64"))


def test_a_release_that_nobody_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_host", lambda: None)
    file = csv_of(rows_of(truth(), CELLS), tmp_path / "rows.csv")
    assert (
        "`--vllm RELEASE` names it"
        in planned("--rows", str(file), "--acceptance", "76,56,43").as_text()
    )


# ---------------------------------------------------------------------------------------- the sweep


def test_a_sweep_times_steps() -> None:
    with FakeServer(Behaviour(step=0.02)) as server:
        found = sweep(Server(server.url), "kimi", (1, 4), (500, 2000), max_model_len=32768)
    assert [(s.k, s.batch) for s in found.steps] == [(3, 1), (3, 4)] * 2
    assert all(step.seconds == pytest.approx(0.02) for step in found.steps)
    assert found.steps[-1].context == 2000 + TOKENS / 2
    assert not found.skipped
    prompts = [body["prompt"] for path, body in server.bodies if path == "/v1/completions"]
    assert len(set(prompts[-4:])) == 4, "no two requests share a prompt"


def test_a_sweep_of_two_servers() -> None:
    with FakeServer(Behaviour(step=0.025)) as fast, FakeServer(
        Behaviour(step=0.02, speculates=False, rates=lambda length: (0, 0, 0))
    ) as plain:  # fmt: skip
        plan = planned("--url", fast.url, "--without", plain.url, "--batch", "1,4",
                       "--context", "600")  # fmt: skip
    assert plan.model is not None
    gain = plan.model.speed_up(3, 1, 648, plan.rates)
    assert gain.value == pytest.approx(2.74 * 20 / 25, rel=0.05)
    assert str(plan.release.version) == "0.26.0"
    assert "repeat one text" in plan.acceptance


def test_cells_that_do_not_fit_are_left_out() -> None:
    with FakeServer(Behaviour(max_model_len=2048)) as server:
        plan = planned("--url", server.url, "--context", "500,8000", "--batch", "1")
    assert len(plan.skipped) == 1
    assert "the server takes 2,048" in plan.skipped[0]


def without(name: str) -> Callable[[str, int], str]:
    return lambda text, n: "\n".join(line for line in text.split("\n") if name not in line)


def changed(name: str, value: Callable[[float, int], float]) -> Callable[[str, int], str]:
    """The metrics with the counters of a name as another number, by reading."""

    def change(text: str, n: int) -> str:
        pattern = rf"(?m)^(vllm:{name}\{{.*\}}) (\S+)$"
        return re.sub(pattern, lambda m: f"{m[1]} {value(float(m[2]), n)}", text)

    return change


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (without("per_pos"), "lacks counters of drafts"),
        (without("num_drafts"), "lacks counters of drafts"),
        (changed("spec_decode.*per_pos_total", lambda v, n: math.nan), "per_pos.* is nan"),
        (changed("spec_decode_num_accepted_tokens_total", lambda v, n: n * 1e6), "by their pos"),
        (changed("spec_decode_num_draft_tokens_total", lambda v, n: v * 2), "6 drafts a step"),
        (changed("spec_decode_num_draft_tokens_total", lambda v, n: v * 100), "300 drafts a step"),
        (changed(".*_(?:total|sum|count)", lambda v, n: v if n < 4 else v // 100), "started again"),
        (lambda text, n: text + exposition({("kimi", "1"): Counters()}, False),
         "lacks counters of drafts"),
    ],
)  # fmt: skip
def test_steps_whose_drafts_are_not_known_are_not_planned_from(
    metrics: Callable[[str, int], str], said: str
) -> None:
    """They would be taken for steps without drafts, or with too many."""
    with FakeServer(Behaviour(step=0.05, metrics=metrics)) as server:
        plan = planned("--url", server.url, "--acceptance", "76,56,43", "--batch", "1",
                       "--context", "600")  # fmt: skip
    assert len(plan.skipped) == 1
    assert re.search(said, plan.skipped[0])
    assert ids(plan) == ["plan-no-input"]
    assert plan.exit_code == 2


def test_steps_without_drafts_alone_are_no_plan_for_a_server_with_them() -> None:
    """With drafts a step takes five times as long here, which the usual numbers do not say."""
    with FakeServer(Behaviour(step=0.1, metrics=without("per_pos"))) as server, FakeServer(
        Behaviour(step=0.02, speculates=False)
    ) as plain:  # fmt: skip
        plan = planned("--url", server.url, "--without", plain.url, "--acceptance", "76,56,43",
                       "--batch", "1", "--context", "600")  # fmt: skip
        assert not plain.bodies
    assert ids(plan) == ["plan-no-input"]
    assert plan.exit_code == 2
    assert "skipped" in plan.findings[0].fix


@pytest.mark.parametrize("ended", [True, False])
def test_requests_of_others_are_not_planned_from(ended: bool) -> None:
    behaviour = Behaviour(foreign=3) if ended else Behaviour(
        metrics=changed("generation_tokens_total", lambda v, n: v + 500 * n)
    )  # fmt: skip
    with FakeServer(behaviour) as server:
        plan = planned("--url", server.url, "--batch", "1", "--context", "600")
    assert "others used the server" in plan.skipped[0]
    assert plan.exit_code == 2


def test_a_cell_begins_when_the_requests_before_it_are_counted() -> None:
    """vLLM counts the end of a request after its answer, so its own are not those of others."""
    late: list[str] = []

    def metrics(text: str, n: int) -> str:
        late.append(text)
        return late[max(0, n - 2)]

    with FakeServer(Behaviour(metrics=metrics)) as server:
        found = sweep(Server(server.url), "kimi", (1, 4), (600,))
    assert not found.skipped
    assert [(s.k, s.batch) for s in found.steps] == [(3, 1), (3, 4)]


def test_a_server_that_is_not_there() -> None:
    plan = planned("--url", "localhost:1")
    assert ids(plan) == ["diagnose-no-answer", "plan-no-input"]
    assert plan.exit_code == 2


def test_a_model_that_is_not_served() -> None:
    with FakeServer() as server:
        plan = planned("--url", server.url, "--model", "other")
    assert ids(plan) == ["diagnose-no-answer", "plan-no-input"]
    assert "it has kimi" in plan.findings[0].fact
    assert not server.bodies, "nothing was sent to another one"


def test_two_models_on_one_server_are_not_added_up() -> None:
    second = exposition({("other", "0"): Counters(9, 27, [1, 0, 0])})
    behaviour = Behaviour(models=("adapter",), metrics=lambda text, n: (
        text.replace('"adapter"', '"kimi"') + second))  # fmt: skip
    with FakeServer(behaviour) as server:
        plan = planned("--url", server.url)
    assert "2 models: kimi, other" in plan.findings[0].fact


def test_without_is_a_server_without_speculation() -> None:
    with FakeServer() as server:
        plan = planned("--url", server.url, "--without", server.url, "--batch", "1",
                       "--context", "600")  # fmt: skip
    assert "speculates, too" in plan.findings[0].fact
    assert plan.exit_code == 2


@pytest.mark.parametrize("text", ["go_goroutines 1\n", "<html>", ""])
def test_a_server_without_metrics_is_asked_nothing(text: str) -> None:
    with FakeServer(Behaviour(paths={"/metrics": (200, text)})) as server:
        plan = planned("--url", server.url)
    assert "has no metrics of vLLM" in plan.findings[0].fact
    assert not server.bodies


def test_an_interrupted_sweep_does_not_wait_for_its_answers() -> None:
    code = (
        "import signal, sys; from vllm_kimi_eagle3 import cli; "
        # As a terminal starts it: in a script's background the signal is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(cli.main(['plan', '--url', sys.argv[1], '--batch', '4', '--context', '600']))"
    )
    hanging = threading.Event()
    with FakeServer() as server:
        true = server.post

        def slow(path: str, body: dict[str, Any]) -> tuple[int, str]:
            if path == "/v1/completions":
                hanging.set()
                time.sleep(60)
            return true(path, body)

        server.post = slow  # type: ignore[method-assign]
        command = [sys.executable, "-c", code, server.url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert hanging.wait(60)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said


# -------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to plan from"),
        (["--without", "x"], "nothing to plan from"),
        (["--rows", "f", "--without", "x"], "--without is the second server"),
        (["--rows", "f", "--acceptance", "2.8"], "as in 2.8@3"),
        (["--rows", "f", "--batch", "1;2"], "--batch takes numbers"),
        (["--rows", "f", "--batch", "0"], "--batch takes numbers from 1"),
        (["--rows", "f", "--most", "9"], "--most takes 0 to 8"),
        (["--rows", "f", "--max-batch", "0"], "--max-batch takes 1 to"),
        (["--rows", "f", "--where", "x"], "NAME=VALUE"),
        (["--url", "x", "--where", "a=b"], "--where chooses among --rows"),
        (["--url", "x", "--rows", "f"], "--url and --rows are two machines"),
        (["--rows", "f", "--runner", "V3"], "invalid choice"),
        (["--rows", "f", "--data-parallel", "0"], "1 or more ranks"),
        (["--rows", "f", "--for-context", "-1"], "--for-context takes"),
        (["--rows", "f", "--vllm", "latest"], "it takes a release"),
        (["--rows", "f", "--vllm", "1" * 5000], "it takes a release"),
        (["--url", "x", "--batch", "1,100000"], "up to 1024 requests at once"),
        (["--url", "x", "--timeout", "-1"], "--timeout takes up to"),
        (["--url", "x", "--timeout", "inf"], "--timeout takes up to"),
        (["--url", "ftp://x"], "is no address"),
    ],
)
def test_options_that_are_wrong(words: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        run.options_of(words)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan"]) == 64
    assert cli.main(["plan", "--help"]) == 0
    assert cli.main(["plan", "--rows", "nowhere"]) == 64
    assert "nowhere cannot be read" in capsys.readouterr().err
    words = ["plan", *STEP_TIMES, "--acceptance", "76,56,43", "--vllm", "0.26.0"]
    assert cli.main(words) == 0
    assert "num_speculative_tokens = 3" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_speculative_tokens"] == 3


def test_a_defect_of_the_command_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(run, "fit", fails)
    words = ["plan", *STEP_TIMES, "--acceptance", "76,56,43", "--vllm", "0.26.0"]
    assert cli.main(words) == 2
    said = capsys.readouterr().out
    assert "plan stopped at RuntimeError: boom" in said
    assert "plan-stopped" in said
    assert "There is no plan." in said
    assert "drafts  76%, 56%, 43%" in said, "what was known before is kept"


@pytest.mark.parametrize("words", [[], ["--json"]])
@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_a_sweep_is_is_shown_on_a_terminal(
    words: list[str],
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with FakeServer() as server, FakeServer(Behaviour(speculates=False)) as plain:
        sweeps = ["--url", server.url, "--without", plain.url, "--batch", "1,4", "--context", "600"]
        assert cli.main(["plan", *sweeps, *words]) in (0, 2)
    shown = capsys.readouterr()
    assert "\r" not in shown.out
    assert "cell 1 of 2" not in shown.out
    if words:
        assert json.loads(shown.out)["num_speculative_tokens"] >= 0
    if not terminal:
        assert shown.err == ""
        return
    lines = shown.err.split("\r")
    said = [line.strip() for line in lines if line.strip()]
    begun, half = f"[{'.' * 20}]", f"[{'#' * 10}{'.' * 10}]"
    each = [
        f"{begun} cell 1 of 2: 1 requests of 600 tokens",
        f"{half} cell 2 of 2: 4 requests of 600 tokens",
    ]
    assert said == each * 2, "of both servers"
    assert lines[-1] == ""
    assert not lines[-2].strip(), "wiped at the end"


def test_every_kind_of_finding_is_shown_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for kind in KINDS.values():
        if kind.area == "plan":
            assert f'"{kind.id}"' in text, kind.id


def test_the_sweep_waits_for_the_end_of_each_request() -> None:
    """A server counts the end of a request a step after its answer."""

    class Late:
        ended = 0

        def metrics(self) -> str:
            self.ended += 1
            return (
                f'vllm:request_success_total{{engine="0",model_name="m"}} {self.ended}\n'
                'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
            )

    server = Late()
    before = read_page(server.metrics())
    settled(server, before, "m", 4)  # type: ignore[arg-type]
    assert server.ended == 1 + 4


def test_a_cell_is_counted_when_all_of_its_requests_have_ended() -> None:
    """One after the other, in a server that counts each end a reading later."""

    class Late(FakeServer):
        def __init__(self) -> None:
            super().__init__()
            self.pages = [exposition(self.counters)]

        def get(self, path: str) -> tuple[int, str]:
            if path != "/metrics":
                return super().get(path)
            with self._lock:
                return 200, self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]

        def _complete(self, prompt_tokens: int, tokens: int, chat: bool) -> tuple[int, str]:
            answer = super()._complete(prompt_tokens, tokens, chat)
            with self._lock:
                self.pages.append(exposition(self.counters))
            return answer

    with FakeServer() as prompt, Late() as late:
        wanted, found = (sweep(Server(s.url), "kimi", [4], [600]) for s in (prompt, late))
    assert wanted.counts
    assert found == wanted
